// tbik._C, attention, attention_backward, store_kv: checks arguments, allocates results, calls the torch-free core.
//
// Every refusal is a ValueError that says what, where, expected and got. Guarantees: those of attention.h.
#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention.h"
#include "bindings.h"
#include "philox.h"

namespace py = pybind11;

namespace tbik::bindings {

namespace {

void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) { parallel_for(count, 1, body); }

DType narrow_dtype_of(at::ScalarType type, const std::string& where) {
  if (type == at::kDouble) refuse(where + ": expected float32, bfloat16 or float16, got float64");
  return dtype_of(type, where);
}

void require_dense(const at::Tensor& x, int64_t dim, const std::string& where) {
  require_plain_cpu(x, where);
  if (x.dim() != dim) refuse(where + ": expected " + std::to_string(dim) + " dimensions, got shape " + shape_of(x));
}

tbik::HeadRows rows_of(const at::Tensor& x, const std::string& where) {
  require_dense(x, 3, where);
  return {x.const_data_ptr(), narrow_dtype_of(x.scalar_type(), where), x.stride(0), x.stride(1), x.stride(2)};
}

std::vector<int64_t> integers_of(const at::Tensor& x, const std::string& where) {
  require_dense(x, 1, where);
  if (x.scalar_type() != at::kLong && x.scalar_type() != at::kInt) {
    refuse(where + ": expected int64 or int32, got " + std::string(at::toString(x.scalar_type())));
  }
  const at::Tensor dense = x.to(at::kLong).contiguous();
  const int64_t* data = dense.const_data_ptr<int64_t>();
  return {data, data + dense.numel()};
}

void require_offsets(const std::vector<int64_t>& offsets, int64_t total, const std::string& where) {
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != total ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    refuse(where + ": expected offsets that ascend from 0 to the " + std::to_string(total) + " rows, got " +
           (offsets.empty() ? std::string("none")
                            : std::to_string(offsets.front()) + " .. " + std::to_string(offsets.back())));
  }
}

struct Settings {
  std::vector<int64_t> head_offsets;
  double scale;
  double cap;
  bool causal;
  int64_t window;
  double dropout = 0.0;
  std::vector<int64_t> coordinates = {};  // seed, step, name, first sample, first head
};

tbik::PairDropout dropout_of(const std::string& name, const Settings& settings, int64_t sequences, int64_t heads) {
  tbik::PairDropout drop;
  const double p = settings.dropout;
  if (p == 0.0) return drop;
  const std::vector<int64_t>& c = settings.coordinates;
  constexpr int64_t kLimit = int64_t{1} << 32;
  if (!(p > 0.0 && p <= 1.0) || c.size() != 5 || std::any_of(c.begin(), c.end(), [](int64_t x) { return x < 0; })) {
    refuse(name + "dropout: expected p within [0, 1] and seed, step, name, first sample, first head, none negative");
  }
  if (c[3] > kLimit - sequences || c[4] > kLimit - heads - 1) {
    refuse(name + "dropout: samples and heads are numbered below 2^32");
  }
  const auto low = [](int64_t v) { return static_cast<uint32_t>(v); };
  const auto high = [](int64_t v) { return static_cast<uint32_t>(v >> 32); };
  const Words key = philox(low(c[1]), high(c[1]), low(c[2]), high(c[2]), low(c[0]), high(c[0]));
  drop.active = true;
  drop.threshold = static_cast<uint64_t>(std::floor(p * 0x1p+32));
  drop.scale = p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f;
  drop.key[0] = key.w[0];
  drop.key[1] = key.w[1];
  drop.first_sample = low(c[3]);
  drop.first_head = low(c[4]);
  return drop;
}

// What forward and backward have in common. The tensors must outlive the problem.
struct Call {
  tbik::AttentionProblem problem;
  at::Tensor sinks;
  at::Tensor pages;
  int64_t tokens = 0;
};

Call call_of(const char* where, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_q,
             const at::Tensor& k_extent, const std::optional<at::Tensor>& block_table,
             const std::optional<at::Tensor>& sinks, const Settings& settings) {
  const std::string name = std::string(where) + ": ";
  Call call;
  tbik::AttentionProblem& p = call.problem;
  p.q = rows_of(q, name + "q");
  call.tokens = q.size(0);
  p.heads = q.size(1);
  p.dim = q.size(2);
  p.scale = static_cast<float>(settings.scale);
  p.cap = static_cast<float>(settings.cap);
  p.causal = settings.causal;
  p.window = std::min(settings.window, int64_t{1} << 62);  // sees all keys; position + window stays an int64
  p.head_offsets = settings.head_offsets;
  if (p.dim < 1 || p.dim > tbik::kMaxHeadDim) {
    refuse(name + "head_dim: expected 1 to " + std::to_string(tbik::kMaxHeadDim) + ", got " + std::to_string(p.dim));
  }
  const bool paged = block_table.has_value();
  const int64_t head_axis = paged ? 2 : 1;
  int64_t kv_heads = 0;
  auto keys_of = [&](const at::Tensor& x, const std::string& at) {
    require_dense(x, paged ? 4 : 3, at);
    if (x.scalar_type() != q.scalar_type()) {
      refuse(at + ": expected q's dtype " + std::string(at::toString(q.scalar_type())) + ", got " +
             std::string(at::toString(x.scalar_type())));
    }
    if (x.size(head_axis + 1) != p.dim) {
      refuse(at + ": expected head_dim " + std::to_string(p.dim) + " as in q, got shape " + shape_of(x));
    }
    tbik::KeyRows keys;
    keys.rows = {x.const_data_ptr(), narrow_dtype_of(x.scalar_type(), at), x.stride(head_axis - 1), x.stride(head_axis),
                 x.stride(head_axis + 1)};
    if (paged) {
      keys.stride_page = x.stride(0);
      keys.page_size = x.size(1);
      if (keys.page_size < 1) refuse(at + ": pages without slots, shape " + shape_of(x));
    }
    kv_heads = x.size(head_axis);
    return keys;
  };
  p.k = keys_of(k, name + "k");
  p.v = keys_of(v, name + "v");
  if (!k.sizes().equals(v.sizes())) {
    refuse(name + "v: expected k's shape " + shape_of(k) + ", got " + shape_of(v));
  }
  if (static_cast<int64_t>(p.head_offsets.size()) != kv_heads + 1 || p.head_offsets.front() != 0 ||
      p.head_offsets.back() != p.heads || !std::is_sorted(p.head_offsets.begin(), p.head_offsets.end())) {
    refuse(name + "the query heads of the " + std::to_string(kv_heads) + " KV heads must add up to " +
           std::to_string(p.heads));
  }
  const std::vector<int64_t> starts = integers_of(cu_q, name + "cu_q");
  require_offsets(starts, call.tokens, name + "cu_q");
  const std::vector<int64_t> extent = integers_of(k_extent, name + (paged ? "seq_lens" : "cu_k"));
  const int64_t count = static_cast<int64_t>(starts.size()) - 1;
  if (static_cast<int64_t>(extent.size()) != (paged ? count : count + 1)) {
    refuse(name + (paged ? "seq_lens" : "cu_k") + ": expected " + std::to_string(paged ? count : count + 1) +
           " values for " + std::to_string(count) + " sequences, got " + std::to_string(extent.size()));
  }
  int64_t max_pages = 0;
  if (paged) {
    require_dense(*block_table, 2, name + "block_table");
    if (block_table->scalar_type() != at::kInt && block_table->scalar_type() != at::kLong) {
      refuse(name + "block_table: expected int32 or int64, got " +
             std::string(at::toString(block_table->scalar_type())));
    }
    if (block_table->size(0) != count) {
      refuse(name + "block_table: expected one row for each of " + std::to_string(count) + " sequences, got shape " +
             shape_of(*block_table));
    }
    constexpr int64_t kMaxPage = std::numeric_limits<int32_t>::max();
    // an int64 page that is no int32 must not turn into one that is there
    call.pages = (block_table->scalar_type() == at::kLong ? block_table->clamp(-1, kMaxPage) : *block_table)
                     .to(at::kInt)
                     .contiguous();
    max_pages = call.pages.size(1);
  } else {
    require_offsets(extent, k.size(0), name + "cu_k");
  }
  for (int64_t b = 0; b < count; ++b) {
    const size_t i = static_cast<size_t>(b);
    tbik::Sequence s{starts[i], starts[i + 1] - starts[i], 0, 0, nullptr};
    s.k_length = paged ? extent[i] : extent[i + 1] - extent[i];
    s.k_first = paged ? 0 : extent[i];
    const std::string at = name + "sequence " + std::to_string(b) + ": ";
    if (s.k_length < 0) refuse(at + "a negative number of keys: " + std::to_string(s.k_length));
    if (s.q_length > 0 && s.k_length == 0) {
      refuse(at + std::to_string(s.q_length) + " queries and no key; drop its queries");
    }
    if ((p.causal || p.window > 0) && s.q_length > s.k_length) {
      refuse(at + std::to_string(s.q_length) + " queries and " + std::to_string(s.k_length) +
             " keys; causal queries are the last positions of their sequence");
    }
    if (paged) {
      const int64_t needed = s.k_length / p.k.page_size + (s.k_length % p.k.page_size != 0 ? 1 : 0);
      if (needed > max_pages) {
        refuse(at + std::to_string(s.k_length) + " keys need " + std::to_string(needed) + " pages of " +
               std::to_string(p.k.page_size) + ", the block table has " + std::to_string(max_pages));
      }
      s.pages = call.pages.const_data_ptr<int32_t>() + b * max_pages;
      for (int64_t page = 0; s.q_length > 0 && page < needed; ++page) {
        if (s.pages[page] < 0 || s.pages[page] >= k.size(0)) {
          const int64_t named = (*block_table)[b][page].item<int64_t>();
          refuse(at + "block_table names page " + std::to_string(named) + " of " + std::to_string(k.size(0)));
        }
      }
    }
    p.sequences.push_back(s);
  }
  p.dropout = dropout_of(name, settings, count, p.heads);
  p.sinks = nullptr;
  if (sinks) {
    require_dense(*sinks, 1, name + "sinks");
    if (sinks->size(0) != p.heads) {
      refuse(name + "sinks: expected [" + std::to_string(p.heads) + "], got " + shape_of(*sinks));
    }
    narrow_dtype_of(sinks->scalar_type(), name + "sinks");
    call.sinks = sinks->to(at::kFloat).contiguous();
    p.sinks = call.sinks.const_data_ptr<float>();
  }
  return call;
}

using Tensors = std::vector<at::Tensor>;

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_q, const at::Tensor& k_extent,
    const std::optional<at::Tensor>& block_table, const std::optional<at::Tensor>& sinks,
    const std::vector<int64_t>& head_offsets, double scale, double cap, bool causal, int64_t window, double dropout,
    const std::vector<int64_t>& coordinates, const std::string& path) {
  const Call call = call_of("attention", q, k, v, cu_q, k_extent, block_table, sinks,
                            {head_offsets, scale, cap, causal, window, dropout, coordinates});
  const tbik::GemmKernels& gemm = tbik::find_path(path, DType::kFloat32);
  const at::Tensor out = at::empty({call.tokens, call.problem.heads, call.problem.dim}, q.options());
  const auto fp32 = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor m = at::empty({call.tokens, call.problem.heads}, fp32);
  const at::Tensor l = at::empty_like(m);
  tbik::attention(call.problem, {out.data_ptr(), call.problem.q.dtype, m.data_ptr<float>(), l.data_ptr<float>()},
                  tbik::attention_kernels(gemm.name), *gemm.loops, parallel);
  return {out, m, l};
}

Tensors attention_backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& out, const at::Tensor& m, const at::Tensor& l, const at::Tensor& cu_q,
                           const at::Tensor& cu_k, const std::optional<at::Tensor>& sinks,
                           const std::vector<int64_t>& head_offsets, double scale, double cap, bool causal,
                           int64_t window, const std::vector<tbik::Schedule>& programs, double dropout,
                           const std::vector<int64_t>& coordinates, const std::string& path) {
  const Call call = call_of("attention_backward", q, k, v, cu_q, cu_k, std::nullopt, sinks,
                            {head_offsets, scale, cap, causal, window, dropout, coordinates});
  const tbik::AttentionProblem& p = call.problem;
  const std::string name = "attention_backward: ";
  for (const at::Tensor* x : {&grad_out, &out}) {
    if (!x->sizes().equals(q.sizes())) refuse(name + "grad_out and out: expected q's shape, got " + shape_of(*x));
  }
  const tbik::HeadRows grad_rows = rows_of(grad_out, name + "grad_out");
  const tbik::HeadRows out_rows = rows_of(out, name + "out");
  for (const at::Tensor* x : {&m, &l}) {
    require_dense(*x, 2, name + "m and l");
    if (x->scalar_type() != at::kFloat || x->size(0) != call.tokens || x->size(1) != p.heads) {
      refuse(name + "m and l: expected float32 [T, H], got shape " + shape_of(*x));
    }
  }
  if (programs.size() + 1 != p.head_offsets.size()) refuse(name + "expected one schedule per KV head");
  int64_t outputs = 0;
  for (size_t g = 0; g < programs.size(); ++g) {
    if (programs[g].num_inputs != p.head_offsets[g + 1] - p.head_offsets[g]) {
      refuse(name + "the schedule of KV head " + std::to_string(g) + " folds " +
             std::to_string(programs[g].num_inputs) + " query heads, the head has " +
             std::to_string(p.head_offsets[g + 1] - p.head_offsets[g]));
    }
    outputs += static_cast<int64_t>(programs[g].outputs.size());
  }
  const tbik::GemmKernels& gemm = tbik::find_path(path, DType::kFloat32);
  const auto fp32 = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor m_dense = m.contiguous();
  const at::Tensor l_dense = l.contiguous();
  const at::Tensor dq = at::empty({call.tokens, p.heads, p.dim}, fp32);
  const at::Tensor dk = at::empty({k.size(0), outputs, p.dim}, fp32);
  const at::Tensor dv = at::empty_like(dk);
  Tensors result = {dq, dk, dv};
  float* d_sink_rows = nullptr;
  if (sinks) {
    result.push_back(at::empty({call.tokens, p.heads}, fp32));
    d_sink_rows = result.back().data_ptr<float>();
  }
  const tbik::AttentionGradients gradients{&grad_rows,
                                           &out_rows,
                                           m_dense.const_data_ptr<float>(),
                                           l_dense.const_data_ptr<float>(),
                                           &programs,
                                           dq.data_ptr<float>(),
                                           dk.data_ptr<float>(),
                                           dv.data_ptr<float>(),
                                           d_sink_rows,
                                           k.size(0)};
  tbik::attention_backward(p, gradients, tbik::attention_kernels(gemm.name), *gemm.loops, parallel);
  return result;
}

// Whether a write to `written` may change `other`, or another element of itself where they are one tensor.
bool share_memory(const at::Tensor& written, const at::Tensor& other) {
  if (written.is_same(other)) return at::has_internal_overlap(written) == at::MemOverlap::Yes;
  const at::MemOverlapStatus status = at::get_overlap_status(written, other);
  const bool starts_alike = written.numel() > 0 && written.const_data_ptr() == other.const_data_ptr();
  return status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial ||
         (starts_alike && other.numel() > 0);
}

// cache[slot / page][slot % page] = x[t], slot = slots[t]; a negative slot stores nothing. Bytes move, nothing is
// added.
void store_kv(const at::Tensor& k, const at::Tensor& v, at::Tensor& key_cache, at::Tensor& value_cache,
              const at::Tensor& slot_mapping) {
  const std::string name = "store_kv: ";
  const std::vector<int64_t> slots = integers_of(slot_mapping, name + "slot_mapping");
  std::vector<int64_t> sorted;
  std::copy_if(slots.begin(), slots.end(), std::back_inserter(sorted), [](int64_t slot) { return slot >= 0; });
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    refuse(name + "slot_mapping names a slot twice");
  }
  auto store = [&](const at::Tensor& x, at::Tensor& cache, const std::string& at) {
    require_dense(x, 3, at);
    require_dense(cache, 4, at + "'s cache");
    if (x.scalar_type() != cache.scalar_type()) refuse(at + ": another dtype than its cache");
    narrow_dtype_of(x.scalar_type(), at);
    if (x.size(0) != static_cast<int64_t>(slots.size()) || x.size(1) != cache.size(2) || x.size(2) != cache.size(3)) {
      refuse(at + ": expected [" + std::to_string(slots.size()) + ", " + std::to_string(cache.size(2)) + ", " +
             std::to_string(cache.size(3)) + "], got " + shape_of(x));
    }
    if (!sorted.empty() && sorted.back() >= cache.size(0) * cache.size(1)) {
      refuse(name + "slot_mapping names slot " + std::to_string(sorted.back()) + ", the cache has " +
             std::to_string(cache.size(0) * cache.size(1)));
    }
    const int64_t size = static_cast<int64_t>(x.element_size());
    const char* from = static_cast<const char*>(x.const_data_ptr());
    char* to = static_cast<char*>(cache.data_ptr());
    const int64_t page = cache.size(1);
    parallel(x.size(0), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t slot = slots[static_cast<size_t>(t)];
        if (slot < 0) continue;
        for (int64_t g = 0; g < x.size(1); ++g) {
          const char* src = from + (t * x.stride(0) + g * x.stride(1)) * size;
          char* dst = to + (slot / page * cache.stride(0) + slot % page * cache.stride(1) + g * cache.stride(2)) * size;
          if (x.stride(2) == 1 && cache.stride(3) == 1) {
            std::memcpy(dst, src, static_cast<size_t>(x.size(2) * size));
          } else {
            for (int64_t d = 0; d < x.size(2); ++d) {
              std::memcpy(dst + d * cache.stride(3) * size, src + d * x.stride(2) * size, static_cast<size_t>(size));
            }
          }
        }
      }
    });
  };
  if (!key_cache.sizes().equals(value_cache.sizes())) {
    refuse(name + "the caches differ in shape: " + shape_of(key_cache) + " and " + shape_of(value_cache));
  }
  for (const at::Tensor* cache : {&key_cache, &value_cache}) {
    if (share_memory(*cache, *cache)) {
      refuse(name + "a cache has several elements in one place (an expanded view?); pass cache.contiguous()");
    }
    if (share_memory(*cache, k) || share_memory(*cache, v)) {
      refuse(name + "k or v lies in a cache that is written; pass k.clone(), v.clone()");
    }
  }
  if (key_cache.is_same(value_cache) || share_memory(key_cache, value_cache)) {
    refuse(name + "key_cache and value_cache share memory; the values would overwrite the keys");
  }
  store(k, key_cache, name + "k");
  store(v, value_cache, name + "v");
}

}  // namespace

void bind_attention(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("attention", attention, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("cu_q"), py::arg("k_extent"),
        py::arg("block_table"), py::arg("sinks"), py::arg("head_offsets"), py::arg("scale"), py::arg("cap"),
        py::arg("causal"), py::arg("window"), py::arg("dropout") = 0.0, py::arg("coordinates") = std::vector<int64_t>(),
        py::arg("path") = "", Release());
  m.def("attention_backward", attention_backward, py::arg("grad_out"), py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("out"), py::arg("m"), py::arg("l"), py::arg("cu_q"), py::arg("cu_k"), py::arg("sinks"),
        py::arg("head_offsets"), py::arg("scale"), py::arg("cap"), py::arg("causal"), py::arg("window"),
        py::arg("programs"), py::arg("dropout") = 0.0, py::arg("coordinates") = std::vector<int64_t>(),
        py::arg("path") = "", Release());
  m.def("store_kv", store_kv, py::arg("k"), py::arg("v"), py::arg("key_cache"), py::arg("value_cache"),
        py::arg("slot_mapping"), Release());
}

}  // namespace tbik::bindings
