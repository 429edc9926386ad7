"""Hugging Face models on tbik operators. Needs transformers; imported on first use, never by `import tbik`.

parallelize.py   a loaded model -> the same model on tbik operators, in place, at any TP; every refusal
modules.py       what takes the place of the model's modules
rows.py          padded batches, packed rows and caches -> the tokens that exist; SampleBatch
attention.py     attn_implementation="tbik" for a model that is otherwise Hugging Face's
checkpoint.py    safetensors in and out, each rank its shard; where the shards stand in the whole
"""
