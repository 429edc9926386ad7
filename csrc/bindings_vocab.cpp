// tbik._C, vocabulary operators: checks arguments, allocates results, calls csrc/vocab.cpp without the GIL.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "vocab.h"

namespace py = pybind11;

namespace tbik::bindings {

namespace {

void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) { parallel_for(count, 1, body); }

// x [..., V] as rows, which live as long as this.
struct Matrix {
  Matrix(const at::Tensor& x, const std::string& where) {
    require_plain_cpu(x, where);
    if (x.dim() == 0) refuse(where + ": expected [..., V], got a scalar");
    const DType dtype = dtype_of(x.scalar_type(), where);
    if (dtype == DType::kFloat64) refuse(where + ": expected bfloat16, float16 or float32, got float64");
    lead = x.sizes().slice(0, x.dim() - 1).vec();
    const int64_t columns = x.size(-1);
    const int64_t rows = c10::multiply_integers(lead);
    kept = x.reshape({rows, columns});
    view = {kept.const_data_ptr(), dtype, rows, columns, kept.stride(0), kept.stride(1)};
  }

  at::Tensor per_row(at::ScalarType type = at::kFloat) const { return at::empty(lead, type); }
  at::Tensor per_row(int64_t n, at::ScalarType type = at::kFloat) const {
    std::vector<int64_t> shape = lead;
    shape.push_back(n);
    return at::empty(shape, type);
  }
  at::Tensor cover(const RowOrder& order) const {
    std::vector<int64_t> shape = lead;
    shape.insert(shape.begin(), order.outputs());
    return at::empty(shape, at::kFloat);
  }
  at::Tensor like() const {
    std::vector<int64_t> shape = lead;
    shape.push_back(view.columns);
    return empty_result(shape, kept.options());
  }

  std::vector<int64_t> lead;
  at::Tensor kept;
  RowInput view;
};

// One fp32 (or int64) value per row, contiguous.
at::Tensor values(const at::Tensor& t, const Matrix& x, const std::string& where, at::ScalarType type = at::kFloat) {
  require_plain_cpu(t, where);
  if (t.scalar_type() != type || !t.sizes().equals(x.lead)) {
    refuse(where + ": expected " + at::toString(type) + ", one value per row, got " + at::toString(t.scalar_type()) +
           " " + shape_of(t));
  }
  return t.contiguous();
}

Matrix beside(const at::Tensor& dy, const at::Tensor& x, const std::string& where) {
  if (dy.scalar_type() != x.scalar_type() || !dy.sizes().equals(x.sizes())) {
    refuse(where + ": expected " + at::toString(x.scalar_type()) + " " + shape_of(x) + " as x, got " +
           at::toString(dy.scalar_type()) + " " + shape_of(dy));
  }
  return Matrix(dy, where);
}

const float* in(const at::Tensor& t) { return t.const_data_ptr<float>(); }
float* out(at::Tensor& t) { return t.mutable_data_ptr<float>(); }

RowOrder whole(const Matrix& x, int64_t leaves) {
  return RowOrder({x.view.columns, leaves, 0, leaves, true}, x.view.columns);
}

VocabContext context_of(const std::string& path) {
  static const ParallelFor threads = parallel;
  return {find_vocab(path), threads};
}

at::Tensor vocab_max(const at::Tensor& x, const std::string& path) {
  const Matrix rows(x, "vocab_max: x");
  at::Tensor m = rows.per_row();
  row_max(rows.view, out(m), context_of(path));
  return m;
}

at::Tensor vocab_sums(const at::Tensor& x, const std::optional<at::Tensor>& m, int64_t length, int64_t leaves,
                      int64_t lo, int64_t hi, const std::string& path) {
  const Matrix rows(x, "vocab_sums: x");
  const RowOrder order({length, leaves, lo, hi, false}, rows.view.columns);
  const at::Tensor highest = m ? values(*m, rows, "vocab_sums: m") : at::Tensor();
  at::Tensor sums = rows.cover(order);
  row_sums(rows.view, m ? in(highest) : nullptr, order, out(sums), context_of(path));
  return sums;
}

at::Tensor vocab_finish(const at::Tensor& m, const at::Tensor& s, const std::string& path) {
  require_plain_cpu(m, "vocab_finish: m");
  require_plain_cpu(s, "vocab_finish: s");
  if (m.scalar_type() != at::kFloat || s.scalar_type() != at::kFloat || !m.sizes().equals(s.sizes())) {
    refuse("vocab_finish: expected two float32 tensors of one shape, got " + shape_of(m) + " and " + shape_of(s));
  }
  const at::Tensor highest = m.contiguous();
  const at::Tensor sums = s.contiguous();
  at::Tensor lse = at::empty(m.sizes(), at::kFloat);
  finish_log_sum_exp(in(highest), in(sums), out(lse), m.numel(), context_of(path));
  return lse;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> vocab_softmax(const at::Tensor& x, int64_t leaves,
                                                             const std::string& path) {
  const Matrix rows(x, "vocab_softmax: x");
  const RowOrder order = whole(rows, leaves);
  at::Tensor p = rows.like();
  at::Tensor m = rows.per_row();
  at::Tensor s = rows.per_row();
  softmax(rows.view, order, out(m), out(s), p.mutable_data_ptr(), context_of(path));
  return {p, m, s};
}

at::Tensor vocab_softmax_of(const at::Tensor& x, const at::Tensor& m, const at::Tensor& s, const std::string& path) {
  const Matrix rows(x, "vocab_softmax_of: x");
  const at::Tensor highest = values(m, rows, "vocab_softmax_of: m");
  const at::Tensor sums = values(s, rows, "vocab_softmax_of: s");
  at::Tensor p = rows.like();
  softmax_of(rows.view, in(highest), in(sums), p.mutable_data_ptr(), context_of(path));
  return p;
}

at::Tensor vocab_softmax_dots(const at::Tensor& dp, const at::Tensor& x, const at::Tensor& m, const at::Tensor& s,
                              int64_t length, int64_t leaves, int64_t lo, int64_t hi, const std::string& path) {
  const Matrix rows(x, "vocab_softmax_dots: x");
  const Matrix gradient = beside(dp, x, "vocab_softmax_dots: dp");
  const RowOrder order({length, leaves, lo, hi, false}, rows.view.columns);
  const at::Tensor highest = values(m, rows, "vocab_softmax_dots: m");
  const at::Tensor sums = values(s, rows, "vocab_softmax_dots: s");
  at::Tensor dots = rows.cover(order);
  softmax_dots(gradient.view, rows.view, in(highest), in(sums), order, out(dots), context_of(path));
  return dots;
}

at::Tensor vocab_softmax_dx(const at::Tensor& dp, const at::Tensor& x, const at::Tensor& m, const at::Tensor& s,
                            const std::optional<at::Tensor>& dots, int64_t leaves, const std::string& path) {
  const Matrix rows(x, "vocab_softmax_dx: x");
  const Matrix gradient = beside(dp, x, "vocab_softmax_dx: dp");
  const at::Tensor highest = values(m, rows, "vocab_softmax_dx: m");
  const at::Tensor sums = values(s, rows, "vocab_softmax_dx: s");
  const at::Tensor given = dots ? values(*dots, rows, "vocab_softmax_dx: dots") : at::Tensor();
  at::Tensor dx = rows.like();
  softmax_dx(gradient.view, rows.view, in(highest), in(sums), dots ? in(given) : nullptr, whole(rows, leaves),
             dx.mutable_data_ptr(), context_of(path));
  return dx;
}

std::tuple<at::Tensor, at::Tensor> vocab_log_softmax(const at::Tensor& x, int64_t leaves, const std::string& path) {
  const Matrix rows(x, "vocab_log_softmax: x");
  const RowOrder order = whole(rows, leaves);
  at::Tensor y = rows.like();
  at::Tensor lse = rows.per_row();
  log_softmax(rows.view, order, out(lse), y.mutable_data_ptr(), context_of(path));
  return {y, lse};
}

at::Tensor vocab_log_softmax_of(const at::Tensor& x, const at::Tensor& lse, const std::string& path) {
  const Matrix rows(x, "vocab_log_softmax_of: x");
  const at::Tensor given = values(lse, rows, "vocab_log_softmax_of: lse");
  at::Tensor y = rows.like();
  log_softmax_of(rows.view, in(given), y.mutable_data_ptr(), context_of(path));
  return y;
}

at::Tensor vocab_log_softmax_dx(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& lse,
                                const std::optional<at::Tensor>& total, int64_t leaves, const std::string& path) {
  const Matrix rows(x, "vocab_log_softmax_dx: x");
  const Matrix gradient = beside(dy, x, "vocab_log_softmax_dx: dy");
  const at::Tensor normal = values(lse, rows, "vocab_log_softmax_dx: lse");
  const at::Tensor given = total ? values(*total, rows, "vocab_log_softmax_dx: total") : at::Tensor();
  at::Tensor dx = rows.like();
  log_softmax_dx(gradient.view, rows.view, in(normal), total ? in(given) : nullptr, whole(rows, leaves),
                 dx.mutable_data_ptr(), context_of(path));
  return dx;
}

at::Tensor vocab_log_sum_exp(const at::Tensor& x, int64_t leaves, const std::string& path) {
  const Matrix rows(x, "vocab_log_sum_exp: x");
  at::Tensor lse = rows.per_row();
  log_sum_exp(rows.view, whole(rows, leaves), out(lse), context_of(path));
  return lse;
}

at::Tensor vocab_losses(const at::Tensor& lse, const at::Tensor& picked, const at::Tensor& targets,
                        int64_t ignore_index, const std::string& path) {
  require_plain_cpu(lse, "vocab_losses: lse");
  require_plain_cpu(picked, "vocab_losses: picked");
  require_plain_cpu(targets, "vocab_losses: targets");
  if (lse.scalar_type() != at::kFloat || picked.scalar_type() != at::kFloat || targets.scalar_type() != at::kLong ||
      !picked.sizes().equals(lse.sizes()) || !targets.sizes().equals(lse.sizes())) {
    refuse("vocab_losses: expected lse and picked in float32 and targets in int64, alike in shape, got " +
           shape_of(lse) + ", " + shape_of(picked) + ", " + shape_of(targets));
  }
  const at::Tensor normal = lse.contiguous();
  const at::Tensor logits = picked.contiguous();
  const at::Tensor ids = targets.contiguous();
  at::Tensor loss = at::empty(lse.sizes(), at::kFloat);
  cross_entropy_losses(in(normal), in(logits), ids.const_data_ptr<int64_t>(), ignore_index, out(loss), lse.numel(),
                       context_of(path));
  return loss;
}

at::Tensor vocab_cross_entropy_dx(const at::Tensor& g, const at::Tensor& x, const at::Tensor& targets,
                                  const at::Tensor& lse, int64_t first, int64_t ignore_index, const std::string& path) {
  const Matrix rows(x, "vocab_cross_entropy_dx: x");
  const at::Tensor upstream = values(g, rows, "vocab_cross_entropy_dx: g");
  const at::Tensor ids = values(targets, rows, "vocab_cross_entropy_dx: targets", at::kLong);
  const at::Tensor normal = values(lse, rows, "vocab_cross_entropy_dx: lse");
  at::Tensor dx = rows.like();
  cross_entropy_dx(in(upstream), rows.view, ids.const_data_ptr<int64_t>(), in(normal), first, ignore_index,
                   dx.mutable_data_ptr(), context_of(path));
  return dx;
}

// ids [..., n] of x [..., V].
at::Tensor vocab_pick(const at::Tensor& x, const at::Tensor& ids, int64_t first, const std::string& path) {
  const Matrix rows(x, "vocab_pick: x");
  require_plain_cpu(ids, "vocab_pick: ids");
  if (ids.scalar_type() != at::kLong || ids.dim() != x.dim() ||
      !ids.sizes().slice(0, ids.dim() - 1).equals(rows.lead)) {
    refuse("vocab_pick: ids: expected int64 [..., n] beside x " + shape_of(x) + ", got " +
           at::toString(ids.scalar_type()) + " " + shape_of(ids));
  }
  const at::Tensor dense = ids.contiguous();
  at::Tensor picked = at::empty(ids.sizes(), at::kFloat);
  pick(rows.view, dense.const_data_ptr<int64_t>(), ids.size(-1), first, out(picked), context_of(path));
  return picked;
}

std::tuple<at::Tensor, at::Tensor> vocab_top_k(const at::Tensor& x, const std::optional<at::Tensor>& ids, int64_t first,
                                               int64_t k, const std::string& path) {
  const Matrix rows(x, "vocab_top_k: x");
  if (k < 0) refuse("vocab_top_k: k: expected an integer >= 0, got " + std::to_string(k));
  at::Tensor dense;
  if (ids) {
    require_plain_cpu(*ids, "vocab_top_k: ids");
    if (ids->scalar_type() != at::kLong || !ids->sizes().equals(x.sizes())) {
      refuse("vocab_top_k: ids: expected int64 " + shape_of(x) + ", got " + at::toString(ids->scalar_type()) + " " +
             shape_of(*ids));
    }
    dense = ids->contiguous();
  }
  at::Tensor values_Mk = rows.per_row(k);
  at::Tensor ids_Mk = rows.per_row(k, at::kLong);
  top_k(rows.view, ids ? dense.const_data_ptr<int64_t>() : nullptr, first, k, out(values_Mk),
        ids_Mk.mutable_data_ptr<int64_t>(), context_of(path));
  return {values_Mk, ids_Mk};
}

at::Tensor token_sums_of(const at::Tensor& loss, const std::vector<int64_t>& offsets) {
  require_plain_cpu(loss, "token_sums: loss");
  if (loss.scalar_type() != at::kFloat) {
    refuse(std::string("token_sums: loss: expected float32, got ") + at::toString(loss.scalar_type()));
  }
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != loss.numel()) {
    refuse("token_sums: offsets: expected 0 first and the number of tokens, " + std::to_string(loss.numel()) +
           ", last");
  }
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) refuse("token_sums: offsets: expected ascending integers");
  }
  const at::Tensor dense = loss.contiguous();
  at::Tensor sums = at::empty({static_cast<int64_t>(offsets.size()) - 1}, at::kFloat);
  token_sums(in(dense), offsets, out(sums));
  return sums;
}

}  // namespace

void bind_vocab(py::module_& m);

void bind_vocab(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  const auto path = py::arg("path") = "";
  m.def("vocab_max", vocab_max, py::arg("x"), path, Release());
  m.def("vocab_sums", vocab_sums, py::arg("x"), py::arg("m"), py::arg("length"), py::arg("leaves"), py::arg("lo"),
        py::arg("hi"), path, Release());
  m.def("vocab_finish", vocab_finish, py::arg("m"), py::arg("s"), path, Release());
  m.def("vocab_softmax", vocab_softmax, py::arg("x"), py::arg("leaves"), path, Release());
  m.def("vocab_softmax_of", vocab_softmax_of, py::arg("x"), py::arg("m"), py::arg("s"), path, Release());
  m.def("vocab_softmax_dots", vocab_softmax_dots, py::arg("dp"), py::arg("x"), py::arg("m"), py::arg("s"),
        py::arg("length"), py::arg("leaves"), py::arg("lo"), py::arg("hi"), path, Release());
  m.def("vocab_softmax_dx", vocab_softmax_dx, py::arg("dp"), py::arg("x"), py::arg("m"), py::arg("s"), py::arg("dots"),
        py::arg("leaves"), path, Release());
  m.def("vocab_log_softmax", vocab_log_softmax, py::arg("x"), py::arg("leaves"), path, Release());
  m.def("vocab_log_softmax_of", vocab_log_softmax_of, py::arg("x"), py::arg("lse"), path, Release());
  m.def("vocab_log_softmax_dx", vocab_log_softmax_dx, py::arg("dy"), py::arg("x"), py::arg("lse"), py::arg("total"),
        py::arg("leaves"), path, Release());
  m.def("vocab_log_sum_exp", vocab_log_sum_exp, py::arg("x"), py::arg("leaves"), path, Release());
  m.def("vocab_losses", vocab_losses, py::arg("lse"), py::arg("picked"), py::arg("targets"), py::arg("ignore_index"),
        path, Release());
  m.def("vocab_cross_entropy_dx", vocab_cross_entropy_dx, py::arg("g"), py::arg("x"), py::arg("targets"),
        py::arg("lse"), py::arg("first"), py::arg("ignore_index"), path, Release());
  m.def("vocab_pick", vocab_pick, py::arg("x"), py::arg("ids"), py::arg("first"), path, Release());
  m.def("vocab_top_k", vocab_top_k, py::arg("x"), py::arg("ids"), py::arg("first"), py::arg("k"), path, Release());
  m.def("token_sums", token_sums_of, py::arg("loss"), py::arg("offsets"), Release());
}

}  // namespace tbik::bindings
