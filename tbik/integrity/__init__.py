"""Exact comparison of what must be equal: digests of tensors and models that no layout can change.

fingerprint.py   one 64-bit number of a tensor, a state dict or a model, the same for every sharding
pieces.py        where the elements of a shard stand in the whole tensor: integers only
"""
