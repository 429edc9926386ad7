// What the host hands to one launch of the peer-memory reductions, and what ranks write into each other's segments.
// Plain data: tbik/peer_memory.py has the same structures in ctypes and compares their sizes when it loads a library.
//
//   segment of a rank   Header | staging of even calls | of odd calls | results of even calls | of odd calls
//
// A rank's segment is mapped by all ranks of the group. Peers write only its header (messages, given_up); they read
// only its staging and results. Offsets and counts are 64 bits wide.
#pragma once

#include <cstdint>

namespace tbik::peer {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxBlocks = 64;
inline constexpr int kMaxInputs = 64;
inline constexpr int kMaxSlots = 8;  // pending nodes, in registers
inline constexpr int kGranule = 16;  // elements: chunks and the shares of blocks begin at multiples of it

// The numbers of csrc/reduce_ops.h.
enum class Element : int32_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3, kInt32 = 7, kInt64 = 8 };
enum class Op : int32_t { kSum = 0, kAvg = 1, kProduct = 2, kMin = 3, kMax = 4, kPremulSum = 8 };
enum class Placement : int32_t { kOneShot = 0, kTwoShot = 1, kScatter = 2 };

enum class Phase : int32_t { kInputs = 0, kResults = 1 };
inline constexpr int kPhases = 2;

// What block b of a rank tells block b of each peer, in the slots of the call's parity: a peer may be one call ahead.
struct Message {
  uint64_t what;   // collective, operator, element type, count: the same on all ranks
  uint64_t order;  // digest of the additions and of what else must agree
  uint64_t factor;
  uint64_t number;  // of the call; written last (release), read first (acquire)
};

struct Header {
  uint32_t failed;               // of this rank: no kernel waits any more
  uint32_t given_up[kMaxRanks];  // by peers: they will not send anything more
  uint32_t unused[15];
  uint64_t calls[kMaxBlocks];  // all equal between two launches; copy c belongs to block c % blocks of a launch
  Message messages[2][kPhases][kMaxRanks][kMaxBlocks];
};

enum class Failure : int64_t { kNone = 0, kTimeout = 1, kMismatch = 2, kGaveUp = 3 };

// The first failure of a rank; in memory that the host reads while kernels run.
struct Status {
  int64_t failure;  // written last
  int64_t peer;
  int64_t phase;
  int64_t block;
  uint64_t expected;  // number of the call
  uint64_t seen;      // the peer's
  int64_t waited_ns;
  uint64_t what;  // kMismatch: the peer's
  uint64_t order;
};

// Load input `row` of rank `rank` on the stack, then add the top two `adds` times.
struct Push {
  uint8_t rank;
  uint8_t row;
  uint8_t adds;
  uint8_t unused;
};

// Elements of x: rows of chunks; chunk c of a row begins at c * chunk_stride and has min(width, count - c * width)
// elements. One-shot: one chunk. In staging the rows lie `pitch` apart, the chunks `width` rounded up to kGranule.
struct Call {
  uint64_t segments[kMaxRanks];  // addresses in this process
  uint64_t status;               // as the device sees it
  uint64_t x;
  uint64_t out;
  uint64_t bias;  // in the accumulation type, or 0
  int64_t staging[2];
  int64_t results[2];  // bytes from the segment's beginning
  int64_t count;
  int64_t width;
  int64_t num_chunks;
  int64_t chunk_stride;
  int64_t row_stride;
  int64_t pitch;
  int64_t columns;     // of the bias
  int64_t bias_first;  // column of x's element 0
  int64_t divisor;
  double factor;
  int64_t limit_ns;
  uint64_t what;
  uint64_t order;
  int32_t rank;
  int32_t size;
  int32_t rows;  // of this rank
  Placement placement;
  Op op;
  Element element;
  Element out_element;
  int32_t blocks;
  int32_t num_pushes;
  int32_t rounds;            // every input and node is rounded to bfloat16, + (+0.0) (ORDER.md A6)
  int32_t is_tree_of_ranks;  // the pushes are node(0, size) of one row per rank
  int32_t unused;
  Push pushes[kMaxInputs];
};

}  // namespace tbik::peer
