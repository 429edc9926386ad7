// Reductions over the ranks of a transport: out = epilogue(node(0, W)) of one leaf per rank (ORDER.md B1).
//
//   all_reduce       out[e] = root[e]                          on every rank
//   reduce           out[e] = root[e]                          on one rank
//   reduce_scatter   out[e] = root[offset of chunk r + e]      rank r of W
//
// Placements say who folds which elements, and nothing else; the additions of an element are csrc/tree.h's schedule of
// the W leaves in every one of them. n elements, W ranks, G ranks per node, N = W/G nodes; elements sent per rank:
//
//   one_shot    everybody sends everything and folds everything                              (W-1) n
//   two_shot    chunk p to rank p, who folds it; results to everybody                        2 n (W-1)/W
//   two_level   chunk p to rank p of the node, who folds the node's leaves to a cover; its
//               N parts to the same rank of every node, who folds the root; results back
//               across the nodes, then inside the node                                       between nodes: 2 (n/G)
//               (N-1)/N
//
// reduce: as all_reduce, results only to the root. reduce_scatter: two_shot's first half, (W-1)/W n; by two_level,
// chunk (c, b) of rank b of node c to rank b of the sender's node, who folds the node's leaves; the cover to its owner:
// between nodes (n/G) (N-1)/N. Covers of several nodes, and 16-bit floats, whose covers are fp32, send so much more:
// kAuto takes two_level only where it sends fewer bytes between nodes than two_shot. That is always so for all_reduce;
// for reduce and reduce_scatter not with 16-bit floats on nodes of 2, 3 or 5 ranks.
//
// A message is cut into segments, and a placement into stages; round t runs stage s on segment t - s, so that one
// exchange moves the pieces of several stages. Extra memory: one copy of an in-place message of several segments, and
// the transport's fixed buffers. Stage and commit: a message of one segment is written after the last exchange; one of
// several segments is saved piece by piece before it is overwritten, and restored before the call throws. So a call
// that throws leaves an in-place tensor as it was; an out-of-place result is then undefined. Between the last exchange
// and the first byte that is not restored any more the caller is asked (Request::commit), so that one who has meanwhile
// given up on the call can have it fail.
//
// Every message carries (call, collective, op, element type, count, placement, root, factor). Ranks that disagree all
// throw kMismatch in the first round, and stay in step. Guarantees: deterministic; independent of size, placement,
// transport. One thread at a time. Errors: TransportError, std::invalid_argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reduce_ops.h"
#include "transport.h"
#include "tree.h"

namespace tbik {

enum class Collective : uint8_t {
  kAllReduce,
  kAllReduceCoalesced,
  kReduce,
  kReduceScatter,
  kReduceScatterTensor,
  kReduceScatterTensorCoalesced,
  kBarrier,
};
enum class Placement : uint8_t { kAuto, kOneShot, kTwoShot, kTwoLevel };

const char* name_of(Collective collective);
const char* name_of(Placement placement);
Placement placement_of(const std::string& name);  // Errors: std::invalid_argument listing the names

struct Request {
  Collective collective = Collective::kAllReduce;
  Op op = Op::kSum;
  Element element = Element::kFloat32;
  double factor = 1.0;  // kPremulSum
  int root = 0;         // reduce
  uint64_t shape = 0;   // compared between the ranks, where the count alone is not enough
  // all_reduce, reduce: one pointer, one count. reduce_scatter: one per rank.
  std::vector<const void*> inputs;
  std::vector<int64_t> counts;
  void* out = nullptr;           // may be the input
  bool out_is_ours = false;      // scratch: may be half-written by a failed call
  std::function<void()> commit;  // called once, after the last exchange; may throw TransportError, which fails the call
};

struct Settings {
  Placement placement = Placement::kAuto;
  int node_size = 0;                  // ranks per node, contiguous; 0 = one node
  int64_t one_shot_bytes = 64 << 10;  // largest message that kAuto sends to everybody
  int64_t segment_bytes = 1 << 18;    // a message travels in segments of this size: what is exchanged stays in caches
  int64_t single_bytes = 1 << 20;     // a message up to this size is one segment: fewer rounds, nothing to save
};

// Bytes that one rank sends in one call.
struct Traffic {
  int64_t within_node = 0;
  int64_t between_nodes = 0;
  int64_t largest_link = 0;  // to one rank
  int64_t rounds = 0;
};

class Collectives {
 public:
  // Errors: std::invalid_argument where node_size does not divide the world or a placement cannot be served.
  Collectives(Transport& transport, const Settings& settings, const Combine& combine);
  ~Collectives();

  void run(const Request& request);
  void barrier();

  // In the place of run(), by a rank that cannot make the call: ranks that make it throw kMismatch; if all refuse,
  // nobody does.
  void refuse(Collective collective);

  uint64_t calls() const { return calls_; }
  Placement placement_for(Collective collective, Element element, int64_t bytes) const;

  class Flow;  // one placement of one call

 private:
  void meet(Collective collective, bool refused, const char* phase);
  void compare_tags(const Tag& tag, bool first, Rule* rule, std::vector<double>* factors, const std::string& where);
  std::byte* staging(int64_t bytes);
  void give_back();

  Transport& transport_;
  Settings settings_;
  Combine combine_;
  Schedule root_;  // of W leaves
  std::vector<Part> parts_;
  uint64_t calls_ = 0;
  std::unique_ptr<std::byte, void (*)(void*)> staging_{nullptr, std::free};
  int64_t staging_bytes_ = 0;
};

// What every rank would send, without moving a byte. capacity: of one message of the transport.
std::vector<Traffic> dry_run(const Settings& settings, const Request& request, int world, int64_t capacity);

}  // namespace tbik
