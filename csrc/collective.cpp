// See collective.h for what moves and why. Order (schedules of csrc/tree.h, run by csrc/reduce_ops) and placement (the
// Flow classes: sizes, offsets, peers) never share a function.
#include "collective.h"

#include <sys/mman.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace tbik {

namespace {

constexpr int64_t kUnit = 64;                        // bytes; pieces of a message begin at multiples of it
constexpr uint64_t kRefused = 0xff;                  // in a tag, in the place of the operator
constexpr int64_t kKeptStaging = int64_t{64} << 20;  // a larger staging buffer is given back after the call

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// `count` elements in `parts` runs of equal width (the last ones shorter or empty); widths are whole cache lines.
struct Split {
  int64_t count;
  int64_t width;

  Split(int64_t count, int64_t parts, int64_t element_bytes)
      : count(count), width(round_up((count + parts - 1) / parts, kUnit / std::min(kUnit, element_bytes))) {}
  int64_t begin(int64_t part) const { return std::min(count, part * width); }
  int64_t size(int64_t part) const { return begin(part + 1) - begin(part); }
};

// A message of `count` elements as segments of `width`, the last one shorter.
struct Segments {
  int64_t count = 0;
  int64_t width = 1;
  int64_t num = 1;

  int64_t begin(int64_t k) const { return std::min(count, k * width); }
  int64_t size(int64_t k) const { return begin(k + 1) - begin(k); }
};

// As few segments as `footprint` (message bytes of one segment) and `most` elements allow, all of about one size.
template <class Footprint>
Segments cut(int64_t count, int64_t most, int64_t capacity, Footprint footprint) {
  int64_t largest = std::max<int64_t>(1, std::min(count, most));
  while (largest > 1 && footprint(largest) > capacity) largest = largest - std::max<int64_t>(1, largest / 16);
  if (footprint(largest) > capacity) {
    throw std::invalid_argument("collective: one element needs " + std::to_string(footprint(largest)) +
                                " bytes of a message, the transport carries " + std::to_string(capacity));
  }
  Segments segments;
  segments.count = count;
  segments.num = std::max<int64_t>(1, (count + largest - 1) / largest);
  segments.width = std::min(largest, round_up(std::max<int64_t>(1, (count + segments.num - 1) / segments.num), 256));
  segments.num = std::max<int64_t>(1, (count + segments.width - 1) / segments.width);
  return segments;
}

Piece piece(int64_t offset, int64_t elements, int64_t bytes) { return {offset, elements * bytes}; }

bool scatters(Collective c) {
  return c == Collective::kReduceScatter || c == Collective::kReduceScatterTensor ||
         c == Collective::kReduceScatterTensorCoalesced;
}

Tag tag_of(const Request& request, Placement placement, int64_t total, uint64_t call, int64_t segment) {
  Tag tag;
  tag.call[0] = call;
  tag.call[1] = static_cast<uint64_t>(request.collective) | static_cast<uint64_t>(request.op) << 8 |
                static_cast<uint64_t>(request.element) << 16 | static_cast<uint64_t>(placement) << 24 |
                static_cast<uint64_t>(static_cast<uint32_t>(request.root)) << 32;
  tag.call[2] = static_cast<uint64_t>(total);
  tag.own = request.op == Op::kPremulSum ? std::bit_cast<uint64_t>(request.factor) : 0;
  tag.call[3] = static_cast<uint64_t>(segment);
  if (scatters(request.collective)) {
    uint64_t hash = 0xcbf29ce484222325;  // of the chunk sizes
    for (int64_t count : request.counts) hash = (hash ^ static_cast<uint64_t>(count)) * 0x100000001b3;
    tag.call[4] = hash;
  }
  tag.call[5] = request.shape;
  return tag;
}

std::string text_of(const Tag& tag) {
  const Collective collective = static_cast<Collective>(tag.call[1] & 0xff);
  std::string text = std::string(name_of(collective)) + ", call " + std::to_string(tag.call[0]);
  if ((tag.call[1] >> 8 & 0xff) == kRefused) return text + ", refused there (that rank's own error says why)";
  if (collective == Collective::kBarrier) return text;
  text += std::string(", op ") + name_of(static_cast<Op>(tag.call[1] >> 8 & 0xff)) + ", dtype " +
          name_of(static_cast<Element>(tag.call[1] >> 16 & 0xff)) + ", " + std::to_string(tag.call[2]) +
          " elements, placement " + name_of(static_cast<Placement>(tag.call[1] >> 24 & 0xff));
  if (collective == Collective::kReduce) text += ", root " + std::to_string(tag.call[1] >> 32);
  if (scatters(collective)) text += ", chunk sizes #" + std::to_string(tag.call[4] % 100000);
  return text + ", cut every " + std::to_string(tag.call[3]);
}

}  // namespace

// One placement of one call. Offsets are of the sender's message; stage s has its own region of it.
class Collectives::Flow {
 public:
  struct World {
    int rank;
    int size;
    int node_size;
  };
  // What drains need; absent in a dry run.
  struct Io {
    Transport* transport = nullptr;
    const Combine* combine = nullptr;
    const Schedule* root = nullptr;
    const Rule* rule = nullptr;
    const std::vector<double>* factors = nullptr;
  };

  Flow(const Request& request, World world) : request_(request), world_(world), bytes_(size_of(request.element)) {}
  virtual ~Flow() = default;
  virtual size_t num_stages() const = 0;
  virtual const char* phase(size_t stage) const = 0;
  virtual void describe(size_t stage, int64_t segment, Part& part) const = 0;
  virtual void fill(size_t /*stage*/, int64_t /*segment*/, const Io& /*io*/, Part& /*part*/) {}
  // dest: where element 0 of the result would lie.
  virtual void drain(size_t stage, int64_t segment, const Io& io, std::byte* dest) = 0;
  virtual bool delivers() const { return true; }

  Segments segments;

 protected:
  const std::byte* input(size_t i, int64_t element) const {
    return static_cast<const std::byte*>(request_.inputs[i]) + element * bytes_;
  }
  void copy_in(const Io& io, int64_t offset, size_t i, int64_t element, int64_t count) const {
    if (count > 0) {
      std::memcpy(io.transport->outgoing() + offset, input(i, element), static_cast<size_t>(count * bytes_));
    }
  }
  // `to` is of the caller's memory: lent to the wire, or copied into the message.
  void bring(const Io& io, Piece& to, size_t i, int64_t element) const {
    if (to.size == 0) return;
    if (io.transport->lends()) {
      to.at = input(i, element);
    } else {
      std::memcpy(io.transport->outgoing() + to.offset, input(i, element), static_cast<size_t>(to.size));
    }
  }
  void resize(Part& part) const {
    part.to.assign(static_cast<size_t>(world_.size), {});
    part.from.assign(static_cast<size_t>(world_.size), {});
  }
  // Leaves of all ranks, this rank's straight from the caller's memory.
  std::vector<const void*> leaves(const Io& io, size_t stage, const void* own) const {
    std::vector<const void*> result(static_cast<size_t>(world_.size));
    for (int p = 0; p < world_.size; ++p) {
      result[static_cast<size_t>(p)] = p == world_.rank ? own : io.transport->incoming(p, stage);
    }
    return result;
  }
  void fold_root(const Io& io, const std::vector<const void*>& values, int64_t count, void* out) const {
    if (count > 0) reduce(*io.rule, values, true, count, *io.root, out, *io.combine, io.factors);
  }

  const Request& request_;
  const World world_;
  const int64_t bytes_;  // of one element
};

namespace placement {

// Stage 0: everything to everybody.
class OneShot final : public Collectives::Flow {
 public:
  OneShot(const Request& request, World world, int64_t most, int64_t capacity) : Flow(request, world) {
    segments = cut(request.counts[0], most, capacity, [&](int64_t m) { return m * bytes_; });
  }
  size_t num_stages() const override { return 1; }
  const char* phase(size_t) const override { return "all-gather of values"; }
  void describe(size_t, int64_t segment, Part& part) const override {
    const Piece all = piece(0, segments.size(segment), bytes_);
    part.to.assign(static_cast<size_t>(world_.size), all);
    part.from.assign(static_cast<size_t>(world_.size), all);
    if (request_.collective == Collective::kReduce) {
      for (int p = 0; p < world_.size; ++p) {
        if (p != request_.root) part.to[static_cast<size_t>(p)].size = 0;
        if (world_.rank != request_.root) part.from[static_cast<size_t>(p)].size = 0;
      }
    }
  }
  void fill(size_t, int64_t segment, const Io& io, Part& part) override {
    bool copied = false;  // one piece for all
    for (int p = 0; p < world_.size; ++p) {
      Piece& to = part.to[static_cast<size_t>(p)];
      if (p == world_.rank || to.size == 0 || copied) continue;
      bring(io, to, 0, segments.begin(segment));
      copied = !io.transport->lends();
    }
  }
  void drain(size_t stage, int64_t segment, const Io& io, std::byte* dest) override {
    if (!delivers()) return;
    const int64_t begin = segments.begin(segment);
    fold_root(io, leaves(io, stage, input(0, begin)), segments.size(segment), dest + begin * bytes_);
  }
  bool delivers() const override { return request_.collective != Collective::kReduce || world_.rank == request_.root; }
};

// Stage 0: chunk p to rank p, who folds it. Stage 1: results to everybody (reduce: to the root).
class TwoShot final : public Collectives::Flow {
 public:
  TwoShot(const Request& request, World world, int64_t most, int64_t capacity) : Flow(request, world) {
    const auto results = [this](int64_t m) { return round_up(m * bytes_, kUnit); };
    const auto footprint = [&](int64_t m) { return results(m) + Split(m, world_.size, bytes_).width * bytes_; };
    segments = cut(request.counts[0], most, capacity, footprint);
    results_ = results(segments.width);
  }
  size_t num_stages() const override { return 2; }
  const char* phase(size_t stage) const override { return stage == 0 ? "chunks to their owners" : "results to all"; }
  void describe(size_t stage, int64_t segment, Part& part) const override {
    const Split chunks = split(segment);
    resize(part);
    for (int p = 0; p < world_.size; ++p) {
      Piece& to = part.to[static_cast<size_t>(p)];
      Piece& from = part.from[static_cast<size_t>(p)];
      if (stage == 0) {
        to = piece(chunks.begin(p) * bytes_, chunks.size(p), bytes_);
        from = piece(chunks.begin(world_.rank) * bytes_, chunks.size(world_.rank), bytes_);
      } else {
        to = piece(results_, receives(p) ? chunks.size(world_.rank) : 0, bytes_);
        from = piece(results_, receives(world_.rank) ? chunks.size(p) : 0, bytes_);
      }
    }
  }
  void fill(size_t stage, int64_t segment, const Io& io, Part& part) override {
    if (stage != 0) return;
    const Split chunks = split(segment);
    for (int p = 0; p < world_.size; ++p) {
      if (p == world_.rank) continue;
      bring(io, part.to[static_cast<size_t>(p)], 0, segments.begin(segment) + chunks.begin(p));
    }
  }
  void drain(size_t stage, int64_t segment, const Io& io, std::byte* dest) override {
    const Split chunks = split(segment);
    const int64_t begin = segments.begin(segment);
    if (stage == 0) {
      const std::byte* own = input(0, begin + chunks.begin(world_.rank));
      fold_root(io, leaves(io, stage, own), chunks.size(world_.rank), io.transport->outgoing() + results_);
      return;
    }
    if (!delivers()) return;
    for (int p = 0; p < world_.size; ++p) {
      if (chunks.size(p) > 0) {
        std::memcpy(dest + (begin + chunks.begin(p)) * bytes_, io.transport->incoming(p, stage),
                    static_cast<size_t>(chunks.size(p) * bytes_));
      }
    }
  }
  bool delivers() const override { return receives(world_.rank); }

 private:
  Split split(int64_t segment) const { return Split(segments.size(segment), world_.size, bytes_); }
  bool receives(int rank) const { return request_.collective != Collective::kReduce || rank == request_.root; }

  int64_t results_ = 0;  // offset of stage 1
};

// Stage 0: segment k of chunk p to rank p, who folds it.
class Scatter final : public Collectives::Flow {
 public:
  Scatter(const Request& request, World world, int64_t most, int64_t capacity) : Flow(request, world) {
    const int64_t longest = *std::max_element(request.counts.begin(), request.counts.end());
    const auto footprint = [&](int64_t m) { return world_.size * round_up(m * bytes_, kUnit); };
    segments = cut(longest, std::max<int64_t>(1, most / world_.size), capacity, footprint);
    stride_ = round_up(segments.width * bytes_, kUnit);
  }
  size_t num_stages() const override { return 1; }
  const char* phase(size_t) const override { return "chunks to their owners"; }
  void describe(size_t, int64_t segment, Part& part) const override {
    resize(part);
    for (int p = 0; p < world_.size; ++p) {
      part.to[static_cast<size_t>(p)] = piece(p * stride_, size(p, segment), bytes_);
      part.from[static_cast<size_t>(p)] = piece(world_.rank * stride_, size(world_.rank, segment), bytes_);
    }
  }
  void fill(size_t, int64_t segment, const Io& io, Part& part) override {
    for (int p = 0; p < world_.size; ++p) {
      if (p != world_.rank) {
        bring(io, part.to[static_cast<size_t>(p)], static_cast<size_t>(p), segments.begin(segment));
      }
    }
  }
  void drain(size_t stage, int64_t segment, const Io& io, std::byte* dest) override {
    const std::byte* own = input(static_cast<size_t>(world_.rank), segments.begin(segment));
    fold_root(io, leaves(io, stage, own), size(world_.rank, segment), dest + segments.begin(segment) * bytes_);
  }

 private:
  int64_t size(int p, int64_t segment) const {
    const int64_t count = request_.counts[static_cast<size_t>(p)];
    return std::min(count, segments.begin(segment + 1)) - std::min(count, segments.begin(segment));
  }

  int64_t stride_ = 0;
};

// What two levels fold: inside this rank's node, its ranks' leaves to their cover; across nodes, all covers to the
// root.
struct Levels {
  explicit Levels(Collectives::Flow::World world) {
    const int64_t per_node = world.node_size;
    std::vector<Node> all;
    for (int64_t a = 0; a < world.size / per_node; ++a) {
      const std::vector<Node> nodes = cover(a * per_node, (a + 1) * per_node);
      covers.push_back(static_cast<int64_t>(nodes.size()));
      all.insert(all.end(), nodes.begin(), nodes.end());
    }
    const int64_t own = world.rank / per_node;
    within = schedule(leaf_nodes(own * per_node, (own + 1) * per_node));
    across = schedule(all, world.size);
    largest_cover = *std::max_element(covers.begin(), covers.end());
  }

  std::vector<int64_t> covers;  // nodes in the cover of each node's leaves
  int64_t largest_cover = 1;
  Schedule within;
  Schedule across;
};

// Rank (a, b) = rank b of node a, segment k of every chunk. Stage 0: the chunks of (c, p), for all nodes c, to (a, p),
// who folds the node's leaves to their covers. Stage 1: the cover of chunk (c, b) to (c, b), who folds the root.
class TwoLevelScatter final : public Collectives::Flow {
 public:
  TwoLevelScatter(const Request& request, World world, int64_t most, int64_t capacity)
      : Flow(request, world),
        nodes_(world.size / world.node_size),
        per_node_(world.node_size),
        node_(world.rank / world.node_size),
        local_(world.rank % world.node_size),
        acc_bytes_(size_of(accumulation_of(request.element))),
        order_(world) {
    const int64_t longest = *std::max_element(request.counts.begin(), request.counts.end());
    const auto footprint = [&](int64_t m) { return world_.size * stride(m) + nodes_ * cover_stride(m); };
    segments = cut(longest, std::max<int64_t>(1, most / world_.size), capacity, footprint);
    stride_ = stride(segments.width);
    cover_stride_ = cover_stride(segments.width);
  }
  size_t num_stages() const override { return 2; }
  const char* phase(size_t stage) const override {
    return stage == 0 ? "chunks to their column in the node" : "covers to their owners across nodes";
  }
  // The message holds the chunks of (0, p), (1, p), ... side by side, so that one piece carries them to (a, p).
  void describe(size_t stage, int64_t segment, Part& part) const override {
    resize(part);
    if (stage == 0) {
      for (int p = 0; p < per_node_; ++p) {
        const size_t peer = static_cast<size_t>(node_ * per_node_ + p);
        part.to[peer] = {column(p), reach(p, segment)};
        part.from[peer] = {column(local_), reach(local_, segment)};
      }
      return;
    }
    for (int c = 0; c < nodes_; ++c) {
      const int peer = c * per_node_ + local_;
      const int64_t rows = order_.covers[static_cast<size_t>(node_)];
      part.to[static_cast<size_t>(peer)] = piece(cover_offset(c), rows * size(peer, segment), acc_bytes_);
      part.from[static_cast<size_t>(peer)] =
          piece(cover_offset(node_), order_.covers[static_cast<size_t>(c)] * size(world_.rank, segment), acc_bytes_);
    }
  }
  void fill(size_t stage, int64_t segment, const Io& io, Part& /*part*/) override {
    if (stage != 0) return;
    for (int p = 0; p < per_node_; ++p) {
      if (p == local_) continue;
      for (int c = 0; c < nodes_; ++c) {
        const int owner = c * per_node_ + p;
        copy_in(io, column(p) + c * stride_, static_cast<size_t>(owner), segments.begin(segment), size(owner, segment));
      }
    }
  }
  void drain(size_t stage, int64_t segment, const Io& io, std::byte* dest) override {
    if (stage == 0) {
      std::byte* next = io.transport->outgoing();
      for (int c = 0; c < nodes_; ++c) {
        const int owner = c * per_node_ + local_;
        if (size(owner, segment) == 0) continue;
        std::vector<const void*> values(static_cast<size_t>(per_node_));
        std::vector<double> factors;
        for (int p = 0; p < per_node_; ++p) {
          const int rank = node_ * per_node_ + p;
          values[static_cast<size_t>(p)] = p == local_ ? input(static_cast<size_t>(owner), segments.begin(segment))
                                                       : io.transport->incoming(rank, stage) + c * stride_;
          if (io.factors != nullptr) factors.push_back((*io.factors)[static_cast<size_t>(rank)]);
        }
        reduce(*io.rule, values, true, size(owner, segment), order_.within, next + cover_offset(c), *io.combine,
               io.factors != nullptr ? &factors : nullptr);
      }
      return;
    }
    const int64_t count = size(world_.rank, segment);
    if (count == 0) return;
    std::vector<const void*> values;
    for (int c = 0; c < nodes_; ++c) {
      const std::byte* from = io.transport->incoming(c * per_node_ + local_, stage);
      for (int64_t row = 0; row < order_.covers[static_cast<size_t>(c)]; ++row) {
        values.push_back(from + row * count * acc_bytes_);
      }
    }
    reduce(*io.rule, values, false, count, order_.across, dest + segments.begin(segment) * bytes_, *io.combine);
  }

 private:
  int64_t size(int p, int64_t segment) const {
    const int64_t count = request_.counts[static_cast<size_t>(p)];
    return std::min(count, segments.begin(segment + 1)) - std::min(count, segments.begin(segment));
  }
  int64_t stride(int64_t m) const { return round_up(m * bytes_, kUnit); }
  int64_t cover_stride(int64_t m) const { return round_up(order_.largest_cover * m * acc_bytes_, kUnit); }
  int64_t column(int local) const { return local * nodes_ * stride_; }
  // Bytes from the beginning of column `local` to the end of its last chunk.
  int64_t reach(int local, int64_t segment) const {
    for (int c = nodes_ - 1; c >= 0; --c) {
      const int64_t count = size(c * per_node_ + local, segment);
      if (count > 0) return c * stride_ + count * bytes_;
    }
    return 0;
  }
  int64_t cover_offset(int node) const { return world_.size * stride_ + node * cover_stride_; }

  const int nodes_;
  const int per_node_;
  const int node_;
  const int local_;
  const int64_t acc_bytes_;
  const Levels order_;
  int64_t stride_ = 0;
  int64_t cover_stride_ = 0;
};

// Rank (a, b) = rank b of node a. Stage 0: chunk p of the segment to (a, p), who folds the node's leaves to their
// cover. Stage 1: part c of that cover to (c, b), who folds the root. Stage 2: the root to (c, b) of all nodes c. Stage
// 3: the whole chunk to (a, p). reduce: stage 2 only to the node of the root, stage 3 only to the root.
class TwoLevel final : public Collectives::Flow {
 public:
  TwoLevel(const Request& request, World world, int64_t most, int64_t capacity)
      : Flow(request, world),
        nodes_(world.size / world.node_size),
        per_node_(world.node_size),
        node_(world.rank / world.node_size),
        local_(world.rank % world.node_size),
        acc_bytes_(size_of(accumulation_of(request.element))),
        order_(world) {
    segments = cut(request.counts[0], most, capacity, [&](int64_t m) { return layout(m).end; });
    layout_ = layout(segments.width);
  }
  size_t num_stages() const override { return 4; }
  const char* phase(size_t stage) const override {
    constexpr const char* kPhases[] = {"chunks to their owners in the node", "covers to their owners across nodes",
                                       "results across nodes", "results to the node"};
    return kPhases[stage];
  }
  void describe(size_t stage, int64_t segment, Part& part) const override {
    resize(part);
    const Split chunks = split(segment);
    const Split mine(chunks.size(local_), nodes_, bytes_);
    for (int p = 0; p < per_node_; ++p) {
      const size_t peer = static_cast<size_t>(node_ * per_node_ + p);
      if (stage == 0) {
        part.to[peer] = piece(chunks.begin(p) * bytes_, chunks.size(p), bytes_);
        part.from[peer] = piece(chunks.begin(local_) * bytes_, chunks.size(local_), bytes_);
      } else if (stage == 3) {
        part.to[peer] = piece(layout_.chunk, receives(static_cast<int>(peer)) ? chunks.size(local_) : 0, bytes_);
        part.from[peer] = piece(layout_.chunk, receives(world_.rank) ? chunks.size(p) : 0, bytes_);
      }
    }
    for (int c = 0; c < nodes_; ++c) {
      const size_t peer = static_cast<size_t>(c * per_node_ + local_);
      if (stage == 1) {
        part.to[peer] = piece(cover_offset(c), order_.covers[static_cast<size_t>(node_)] * mine.size(c), acc_bytes_);
        part.from[peer] =
            piece(cover_offset(node_), order_.covers[static_cast<size_t>(c)] * mine.size(node_), acc_bytes_);
      } else if (stage == 2) {
        part.to[peer] = piece(layout_.root, node_receives(c) ? mine.size(node_) : 0, bytes_);
        part.from[peer] = piece(layout_.root, node_receives(node_) ? mine.size(c) : 0, bytes_);
      }
    }
  }
  void fill(size_t stage, int64_t segment, const Io& io, Part& part) override {
    if (stage != 0) return;
    const Split chunks = split(segment);
    for (int p = 0; p < per_node_; ++p) {
      if (p == local_) continue;
      bring(io, part.to[static_cast<size_t>(node_ * per_node_ + p)], 0, segments.begin(segment) + chunks.begin(p));
    }
  }
  void drain(size_t stage, int64_t segment, const Io& io, std::byte* dest) override {
    const Split chunks = split(segment);
    const Split mine(chunks.size(local_), nodes_, bytes_);
    std::byte* next = io.transport->outgoing();
    switch (stage) {
      case 0:
        for (int c = 0; c < nodes_; ++c) {
          std::vector<const void*> values(static_cast<size_t>(per_node_));
          std::vector<double> factors;
          for (int p = 0; p < per_node_; ++p) {
            const int rank = node_ * per_node_ + p;
            const std::byte* from = p == local_ ? input(0, segments.begin(segment) + chunks.begin(local_))
                                                : io.transport->incoming(rank, stage);
            values[static_cast<size_t>(p)] = from + mine.begin(c) * bytes_;
            if (io.factors != nullptr) factors.push_back((*io.factors)[static_cast<size_t>(rank)]);
          }
          if (mine.size(c) > 0) {
            reduce(*io.rule, values, true, mine.size(c), order_.within, next + cover_offset(c), *io.combine,
                   io.factors != nullptr ? &factors : nullptr);
          }
        }
        return;
      case 1: {
        std::vector<const void*> values;
        for (int c = 0; c < nodes_; ++c) {
          const std::byte* from = io.transport->incoming(c * per_node_ + local_, stage);
          // incoming() of this rank itself is the piece that it addressed to itself: part `node_`
          for (int64_t row = 0; row < order_.covers[static_cast<size_t>(c)]; ++row) {
            values.push_back(from + row * mine.size(node_) * acc_bytes_);
          }
        }
        if (mine.size(node_) > 0) {
          reduce(*io.rule, values, false, mine.size(node_), order_.across, next + layout_.root, *io.combine);
        }
        return;
      }
      case 2:
        for (int c = 0; c < nodes_ && node_receives(node_); ++c) {
          if (mine.size(c) > 0) {
            std::memcpy(next + layout_.chunk + mine.begin(c) * bytes_,
                        io.transport->incoming(c * per_node_ + local_, stage),
                        static_cast<size_t>(mine.size(c) * bytes_));
          }
        }
        return;
      default:
        for (int p = 0; p < per_node_ && delivers(); ++p) {
          if (chunks.size(p) > 0) {
            std::memcpy(dest + (segments.begin(segment) + chunks.begin(p)) * bytes_,
                        io.transport->incoming(node_ * per_node_ + p, stage),
                        static_cast<size_t>(chunks.size(p) * bytes_));
          }
        }
    }
  }
  bool delivers() const override { return receives(world_.rank); }

 private:
  struct Layout {
    int64_t cover_stride;
    int64_t covers;  // offset of stage 1, then of stages 2 and 3
    int64_t root;
    int64_t chunk;
    int64_t end;
  };

  Split split(int64_t segment) const { return Split(segments.size(segment), per_node_, bytes_); }
  Layout layout(int64_t m) const {
    const Split chunks(m, per_node_, bytes_);
    const int64_t widest = std::min(m, chunks.width);
    const int64_t part = Split(widest, nodes_, bytes_).width;
    Layout result;
    result.cover_stride = round_up(order_.largest_cover * part * acc_bytes_, kUnit);
    result.covers = round_up(m * bytes_, kUnit);
    result.root = result.covers + nodes_ * result.cover_stride;
    result.chunk = result.root + round_up(part * bytes_, kUnit);
    result.end = result.chunk + round_up(widest * bytes_, kUnit);
    return result;
  }
  int64_t cover_offset(int node) const { return layout_.covers + node * layout_.cover_stride; }
  bool receives(int rank) const { return request_.collective != Collective::kReduce || rank == request_.root; }
  bool node_receives(int node) const {
    return request_.collective != Collective::kReduce || node == request_.root / per_node_;
  }

  const int nodes_;
  const int per_node_;
  const int node_;
  const int local_;
  const int64_t acc_bytes_;
  const Levels order_;
  Layout layout_{};
};

std::unique_ptr<Collectives::Flow> make(Placement placement, const Request& request, Collectives::Flow::World world,
                                        const Settings& settings, int64_t capacity) {
  int64_t total = 0;
  for (int64_t count : request.counts) total += count;
  const int64_t bytes = size_of(request.element);
  const int64_t most = total * bytes <= settings.single_bytes ? std::max<int64_t>(1, total)
                                                              : std::max<int64_t>(1, settings.segment_bytes / bytes);
  if (scatters(request.collective)) {
    if (placement == Placement::kTwoLevel) return std::make_unique<TwoLevelScatter>(request, world, most, capacity);
    return std::make_unique<Scatter>(request, world, most, capacity);
  }
  switch (placement) {
    case Placement::kOneShot:
      return std::make_unique<OneShot>(request, world, most, capacity);
    case Placement::kTwoLevel:
      return std::make_unique<TwoLevel>(request, world, most, capacity);
    case Placement::kTwoShot:
    case Placement::kAuto:
      break;
  }
  return std::make_unique<TwoShot>(request, world, most, capacity);
}

// Bytes between nodes, per rank and in units of (n/G) (N-1)/N: the node's covers, in the type of accumulation, and for
// all_reduce the results; by flat placements G times as many elements, all in the type of the message. (reduce: its
// results are as many either way.)
bool fewer_between_nodes(Collective collective, Element element, int node_size, int world) {
  int64_t most = 1;
  for (int64_t first = 0; first < world; first += node_size) {
    most = std::max(most, static_cast<int64_t>(cover(first, first + node_size).size()));
  }
  const int64_t bytes = size_of(element);
  const int64_t back =
      collective == Collective::kAllReduce || collective == Collective::kAllReduceCoalesced ? bytes : 0;
  return most * size_of(accumulation_of(element)) + back < node_size * (bytes + back);
}

Placement choose(const Settings& settings, Collective collective, Element element, int64_t bytes, int world) {
  const bool levels = settings.node_size > 1 && settings.node_size < world;
  const bool scatter = scatters(collective);
  if (settings.placement == Placement::kTwoLevel) {
    return settings.node_size > 0 && settings.node_size < world ? Placement::kTwoLevel : Placement::kTwoShot;
  }
  if (settings.placement != Placement::kAuto) return scatter ? Placement::kTwoShot : settings.placement;
  if (bytes <= settings.one_shot_bytes) return scatter ? Placement::kTwoShot : Placement::kOneShot;
  return levels && fewer_between_nodes(collective, element, settings.node_size, world) ? Placement::kTwoLevel
                                                                                       : Placement::kTwoShot;
}

void require_settings(const Settings& settings, int world) {
  if (settings.node_size < 0 || (settings.node_size > 0 && world % settings.node_size != 0)) {
    throw std::invalid_argument("collective: node_size must divide the number of ranks " + std::to_string(world) +
                                ", got " + std::to_string(settings.node_size));
  }
}

}  // namespace placement

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kAllReduceCoalesced:
      return "all_reduce_coalesced";
    case Collective::kReduce:
      return "reduce";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kReduceScatterTensor:
      return "reduce_scatter_tensor";
    case Collective::kReduceScatterTensorCoalesced:
      return "reduce_scatter_tensor_coalesced";
    case Collective::kBarrier:
      return "barrier";
  }
  return "?";
}

const char* name_of(Placement placement) {
  switch (placement) {
    case Placement::kAuto:
      return "auto";
    case Placement::kOneShot:
      return "one_shot";
    case Placement::kTwoShot:
      return "two_shot";
    case Placement::kTwoLevel:
      return "two_level";
  }
  return "?";
}

Placement placement_of(const std::string& name) {
  for (Placement p : {Placement::kAuto, Placement::kOneShot, Placement::kTwoShot, Placement::kTwoLevel}) {
    if (name == name_of(p)) return p;
  }
  throw std::invalid_argument("placement: expected 'auto', 'one_shot', 'two_shot' or 'two_level', got '" + name + "'");
}

Collectives::Collectives(Transport& transport, const Settings& settings, const Combine& combine)
    : transport_(transport),
      settings_(settings),
      combine_(combine),
      root_(schedule(leaf_nodes(0, transport.size()), transport.size())) {
  placement::require_settings(settings, transport.size());
}

Collectives::~Collectives() = default;

Placement Collectives::placement_for(Collective collective, Element element, int64_t bytes) const {
  return placement::choose(settings_, collective, element, bytes, transport_.size());
}

namespace {

// memcpy past the caches: what is written is not read again unless the call fails.
void stream_copy(std::byte* to, const std::byte* from, int64_t bytes) {
#if defined(__x86_64__)
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & 63);
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + 64 <= bytes; at += 64) {
    const __m128i* source = reinterpret_cast<const __m128i*>(from + at);
    __m128i* target = reinterpret_cast<__m128i*>(to + at);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
  }
  std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
  _mm_sfence();
#else
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

}  // namespace

std::byte* Collectives::staging(int64_t bytes) {
  if (bytes > staging_bytes_) {
    constexpr int64_t kHuge = int64_t{2} << 20;
    const int64_t size = round_up(bytes, kHuge);
    staging_.reset();
    staging_bytes_ = 0;
    void* memory = std::aligned_alloc(static_cast<size_t>(kHuge), static_cast<size_t>(size));
    if (memory == nullptr) throw std::bad_alloc();
    madvise(memory, static_cast<size_t>(size), MADV_HUGEPAGE);  // fewer page faults; refusal does no harm
    staging_.reset(static_cast<std::byte*>(memory));
    staging_bytes_ = size;
  }
  return staging_.get();
}

void Collectives::compare_tags(const Tag& tag, bool first, Rule* rule, std::vector<double>* factors,
                               const std::string& where) {
  bool same = true;
  bool same_factor = true;
  for (int p = 0; p < transport_.size(); ++p) {
    const Tag& other = transport_.tag(p);
    same_factor = same_factor && other.own == tag.own;
    same = same && other.call == tag.call;
  }
  if (!same) {
    std::string text = where + ": the ranks do not make the same call:";
    for (int p = 0; p < transport_.size(); ++p) {
      text += " rank " + std::to_string(p) + ": " + text_of(transport_.tag(p)) + ";";
    }
    text += " no input was changed. Make the calls alike (order, shape, dtype, op) on all ranks";
    if (!first) transport_.abort(text);
    throw TransportError(TransportFailure::kMismatch, text);
  }
  if (first && !same_factor && rule != nullptr) {
    rule->factor_at_leaf = true;
    for (int p = 0; p < transport_.size(); ++p) factors->push_back(std::bit_cast<double>(transport_.tag(p).own));
  }
}

void Collectives::barrier() { meet(Collective::kBarrier, false, "arrival of all ranks"); }

void Collectives::refuse(Collective collective) { meet(collective, true, "refusal"); }

void Collectives::meet(Collective collective, bool refused, const char* phase) {
  Request request;
  request.collective = collective;
  const Where where{name_of(collective), ++calls_, phase, 0, 1};
  transport_.note(where.collective);
  Tag tag = tag_of(request, Placement::kAuto, 0, calls_, 0);
  if (refused) tag.call[1] |= kRefused << 8;
  parts_.clear();
  transport_.exchange(tag, parts_, where);
  compare_tags(tag, true, nullptr, nullptr, tbik::describe(where, transport_.rank(), transport_.size()));
}

void Collectives::run(const Request& request) {
  const std::string refusal = refusal_of(request.op, request.element);
  const size_t expected = scatters(request.collective) ? static_cast<size_t>(transport_.size()) : 1;
  if (!refusal.empty()) throw std::invalid_argument(std::string(name_of(request.collective)) + ": " + refusal);
  if (request.inputs.size() != expected || request.counts.size() != expected) {
    throw std::invalid_argument(std::string(name_of(request.collective)) + ": expected " + std::to_string(expected) +
                                " inputs, got " + std::to_string(request.inputs.size()));
  }
  if (request.root < 0 || request.root >= transport_.size()) {
    throw std::invalid_argument(std::string(name_of(request.collective)) + ": no rank " + std::to_string(request.root));
  }
  int64_t total = 0;
  for (int64_t count : request.counts) total += count;
  const int64_t bytes = size_of(request.element);
  const Placement placement = placement_for(request.collective, request.element, total * bytes);
  const std::unique_ptr<Flow> flow =
      placement::make(placement, request, {transport_.rank(), transport_.size(), settings_.node_size}, settings_,
                      transport_.capacity());

  Rule rule{request.op, request.element, request.op == Op::kAvg ? transport_.size() : 1, request.factor, false};
  std::vector<double> factors;
  Flow::Io io{&transport_, &combine_, &root_, &rule, nullptr};
  Where where{name_of(request.collective), ++calls_, "", 0, flow->segments.num};
  const Tag tag = tag_of(request, placement, total, calls_, flow->segments.width);
  transport_.note(where.collective);

  const int64_t stages = static_cast<int64_t>(flow->num_stages());
  const int64_t rounds = flow->segments.num + stages - 1;
  const int64_t result =
      scatters(request.collective) ? request.counts[static_cast<size_t>(transport_.rank())] : request.counts[0];
  std::byte* const out = static_cast<std::byte*>(request.out);
  // A result of several segments lies in the caller's memory before the last exchange. Where that is this rank's own
  // input, each segment is saved before it is overwritten, and restored if the call fails; where the two overlap in
  // another way, the results wait in the staging buffer.
  bool saves = false;
  bool waits = false;
  if (flow->segments.num > 1 && flow->delivers() && !request.out_is_ours) {
    const size_t own = scatters(request.collective) ? static_cast<size_t>(transport_.rank()) : 0;
    saves = request.inputs[own] == request.out;
    for (size_t i = 0; i < request.inputs.size(); ++i) {
      const std::byte* in = static_cast<const std::byte*>(request.inputs[i]);
      waits = waits || (!saves && in < out + result * bytes && out < in + request.counts[i] * bytes);
    }
  }
  int64_t saved = 0;  // bytes of `out` that lie in the staging buffer
  parts_.resize(static_cast<size_t>(stages));
  try {
    std::byte* const kept = saves || waits ? staging(result * bytes) : nullptr;
    for (int64_t t = 0; t < rounds; ++t) {
      const bool last = t + 1 == rounds;
      for (int64_t s = 0; s < stages; ++s) {
        const int64_t k = t - s;
        Part& part = parts_[static_cast<size_t>(s)];
        if (k < 0 || k >= flow->segments.num) {
          part.to.clear();
          part.from.clear();
          continue;
        }
        flow->describe(static_cast<size_t>(s), k, part);
        flow->fill(static_cast<size_t>(s), k, io, part);
        where.phase = flow->phase(static_cast<size_t>(s));
        where.segment = k;
      }
      transport_.exchange(tag, parts_, where);
      bool same = true;
      for (int p = 0; p < transport_.size(); ++p) same = same && transport_.tag(p) == tag;
      if (!same) {
        compare_tags(tag, t == 0, &rule, &factors, tbik::describe(where, transport_.rank(), transport_.size()));
        io.factors = &factors;
      }
      if (last && request.commit) request.commit();
      for (int64_t s = 0; s < stages; ++s) {
        const int64_t k = t - s;
        if (k < 0 || k >= flow->segments.num) continue;
        if (saves && !last && s + 1 == stages) {
          const int64_t until = std::min(result, flow->segments.begin(k + 1)) * bytes;
          stream_copy(kept + saved, out + saved, until - saved);
          saved = until;
        }
        flow->drain(static_cast<size_t>(s), k, io, waits && !last ? kept : out);
      }
    }
    if (waits) {
      const int64_t staged = std::min(result, flow->segments.begin(flow->segments.num - 1));
      std::memcpy(out, kept, static_cast<size_t>(staged * bytes));
    }
    give_back();
  } catch (const TransportError&) {
    if (saved > 0) std::memcpy(out, staging_.get(), static_cast<size_t>(saved));
    give_back();
    throw;
  } catch (const std::exception& error) {
    if (saved > 0) std::memcpy(out, staging_.get(), static_cast<size_t>(saved));
    give_back();
    transport_.abort(tbik::describe(where, transport_.rank(), transport_.size()) + ": " + error.what());
    throw;
  }
}

void Collectives::give_back() {
  if (staging_bytes_ <= kKeptStaging) return;
  staging_.reset();
  staging_bytes_ = 0;
}

std::vector<Traffic> dry_run(const Settings& settings, const Request& request, int world, int64_t capacity) {
  placement::require_settings(settings, world);
  int64_t total = 0;
  for (int64_t count : request.counts) total += count;
  const Placement chosen =
      placement::choose(settings, request.collective, request.element, total * size_of(request.element), world);
  const int node_size = settings.node_size > 0 ? settings.node_size : world;
  std::vector<Traffic> traffic(static_cast<size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    const std::unique_ptr<Collectives::Flow> flow =
        placement::make(chosen, request, {rank, world, settings.node_size}, settings, capacity);
    Traffic& sent = traffic[static_cast<size_t>(rank)];
    std::vector<int64_t> link(static_cast<size_t>(world));
    Part part;
    for (size_t s = 0; s < flow->num_stages(); ++s) {
      for (int64_t k = 0; k < flow->segments.num; ++k) {
        flow->describe(s, k, part);
        for (int p = 0; p < world; ++p) {
          if (p != rank) link[static_cast<size_t>(p)] += part.to[static_cast<size_t>(p)].size;
        }
      }
    }
    for (int p = 0; p < world; ++p) {
      (p / node_size == rank / node_size ? sent.within_node : sent.between_nodes) += link[static_cast<size_t>(p)];
    }
    sent.largest_link = *std::max_element(link.begin(), link.end());
    sent.rounds = flow->segments.num + static_cast<int64_t>(flow->num_stages()) - 1;
  }
  return traffic;
}

}  // namespace tbik
