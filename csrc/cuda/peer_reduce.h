// One reduction over peer memory, as one block of every rank runs it (nvcc, and the CPU for tests and dry runs):
//
//   x -> own staging | inputs are there | fold -> out                                        one_shot, scatter
//                                       | fold -> own results | results are there | -> out   two_shot
//
// out = epilogue(node(0, L)) of the ranks' rows; two_shot folds chunk `rank` and reads the others' results, scatter
// keeps chunk `rank`. Block b touches the same elements in every phase, so it waits only for block b of its peers.
//
// Numbers. Every rank counts its calls on the device (Header::calls), so a captured graph may be replayed; kernel
// arguments hold no counter. Call n uses the staging, results and messages of parity n % 2. A rank writes those of
// call n + 2 after its call n + 1 has ended, hence after every peer has entered n + 1, hence after every peer has ended
// call n: no barrier at the end of a call. Condition: the launches of a group run one after another on each rank.
//
// Memory. Data lies in the segment of the rank that produced it and is read by peers; messages are written into the
// segment of the rank that waits. A message is a release by one thread after a block barrier, and its reader an acquire
// before one, at system scope.
//
// Waits end after limit_ns by the device's clock. The first one that fails writes Status, sets Header::failed (no later
// launch of this rank waits for anybody) and tells the peers. The output is then undefined.
// Bits: those of csrc/tree.h's schedule in every placement. Order (canonical_node, run_program) and placement (shares,
// chunks) never share a function.
#pragma once

#include "../tree.h"
#include "values.h"

namespace tbik::peer {

// --- placement: which elements -----------------------------------------------------------------------------------

TBIK_HOST_DEVICE int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
TBIK_HOST_DEVICE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

struct Share {
  int64_t begin;
  int64_t end;
};

// Of chunk c, what block b of every rank works on.
TBIK_HOST_DEVICE Share share_of(const Call& call, int64_t chunk, int block) {
  const int64_t left = call.count - chunk * call.width;
  const int64_t size = left < 0 ? 0 : smaller(left, call.width);
  const int64_t width = round_up((call.width + call.blocks - 1) / call.blocks, kGranule);
  return {smaller(size, block * width), smaller(size, (block + 1) * width)};
}

TBIK_HOST_DEVICE Header* header_of(const Call& call, int rank) {
  return reinterpret_cast<Header*>(call.segments[rank]);
}

TBIK_HOST_DEVICE int64_t staged(const Call& call, int64_t row, int64_t chunk) {
  return row * call.pitch + chunk * round_up(call.width, kGranule);
}

template <class Unit, class World>
TBIK_HOST_DEVICE void copy_units(const World& world, char* to, const char* from, int64_t bytes) {
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t i = world.thread(); i < units; i += world.threads()) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
  const int64_t done = units * static_cast<int64_t>(sizeof(Unit));
  for (int64_t i = done + world.thread(); i < bytes; i += world.threads()) to[i] = from[i];
}

template <class World>
TBIK_HOST_DEVICE void copy(const World& world, char* to, const char* from, int64_t bytes) {
  const uint64_t offset = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  if (offset % kPackBytes == 0) {
    copy_units<Pack>(world, to, from, bytes);
  } else if (offset % 4 == 0) {
    copy_units<uint32_t>(world, to, from, bytes);
  } else {
    copy_units<uint16_t>(world, to, from, bytes);
  }
}

// --- movement: messages ------------------------------------------------------------------------------------------

template <class World>
TBIK_HOST_DEVICE void fail(const Call& call, const World& world, Failure failure, int peer, Phase phase,
                           const Message& seen, uint64_t expected, int64_t waited_ns) {
  Header* own = header_of(call, call.rank);
  if (!world.claim(&own->failed)) return;  // another block was first
  Status* status = reinterpret_cast<Status*>(call.status);
  status->peer = peer;
  status->phase = static_cast<int64_t>(phase);
  status->block = world.block();
  status->expected = expected;
  status->seen = seen.number;
  status->waited_ns = waited_ns;
  status->what = seen.what;
  status->order = seen.order;
  world.store_release(reinterpret_cast<uint64_t*>(&status->failure), static_cast<uint64_t>(failure));
  for (int p = 0; p < call.size; ++p) {
    if (p != call.rank) world.store_release(&header_of(call, p)->given_up[call.rank], uint32_t{1});
  }
}

template <class World>
TBIK_HOST_DEVICE bool wait_for(const Call& call, const World& world, uint64_t number, Phase phase, int peer) {
  Header* own = header_of(call, call.rank);
  Message* message = &own->messages[number % 2][static_cast<int>(phase)][peer][world.block()];
  const int64_t start = world.now_ns();
  Message seen{};
  while (true) {
    const bool gave_up = world.load_acquire(&own->given_up[peer]) != 0;  // before its last message is looked for
    seen.number = world.load_acquire(&message->number);
    if (seen.number == number) break;
    const int64_t waited = world.now_ns() - start;
    if (world.load_acquire(&own->failed) != 0) return false;
    if (gave_up || waited > call.limit_ns) {
      fail(call, world, gave_up ? Failure::kGaveUp : Failure::kTimeout, peer, phase, seen, number, waited);
      return false;
    }
    world.pause();
  }
  seen.what = message->what;
  seen.order = message->order;
  if (seen.what == call.what && seen.order == call.order) return true;
  fail(call, world, Failure::kMismatch, peer, phase, seen, number, world.now_ns() - start);
  return false;
}

// Every peer's block has come this far, and what it wrote before can be read. False: some wait of this block failed.
template <class World>
TBIK_HOST_DEVICE bool meet(const Call& call, const World& world, uint64_t number, Phase phase) {
  world.sync();
  const int block = world.block();
  for (int p = world.thread(); p < call.size; p += world.threads()) {
    Message* to = &header_of(call, p)->messages[number % 2][static_cast<int>(phase)][call.rank][block];
    to->what = call.what;
    to->order = call.order;
    to->factor = bits(call.factor);
    world.store_release(&to->number, number);
  }
  bool came = true;
  for (int p = world.thread(); p < call.size; p += world.threads()) {
    if (p != call.rank) came = wait_for(call, world, number, phase, p) && came;
  }
  return !world.any(!came);
}

// The factors of all ranks, of PREMUL_SUM: one at the root, else each at its leaf (ORDER.md A7).
struct Factors {
  const Message* messages;  // of phase kInputs, this block's: kMaxBlocks apart
  bool at_leaf;

  TBIK_HOST_DEVICE uint64_t bits_of(int rank) const { return messages[static_cast<int64_t>(rank) * kMaxBlocks].factor; }
  TBIK_HOST_DEVICE double of(int rank) const { return as_f64(bits_of(rank)); }
};

TBIK_HOST_DEVICE Factors factors_of(const Call& call, uint64_t number, int block) {
  Factors factors{&header_of(call, call.rank)->messages[number % 2][static_cast<int>(Phase::kInputs)][0][block], false};
  if (call.op != Op::kPremulSum) return factors;
  for (int p = 1; p < call.size; ++p) factors.at_leaf = factors.at_leaf || factors.bits_of(p) != factors.bits_of(0);
  return factors;
}

// --- order: which additions --------------------------------------------------------------------------------------

// node(0, kRanks) of one row per rank, all loads first.
template <class S, int kRanks>
TBIK_HOST_DEVICE ValuesOf<S> tree_of_ranks(const Call& call, int64_t offset) {
  Pack packs[kRanks];
  TBIK_UNROLL
  for (int r = 0; r < kRanks; ++r) packs[r] = *reinterpret_cast<const Pack*>(call.segments[r] + offset);
  return canonical_node<0, kRanks>([&](int64_t leaf) { return unpack<S>(packs[leaf]); },
                                   [](const auto& left, const auto& right) { return sum(left, right); });
}

// The stack machine of csrc/tree.h's schedules. Slots are chosen by comparison: an index would put them in memory.
template <class S>
TBIK_HOST_DEVICE ValuesOf<S> run_program(const Call& call, int64_t offset, const Factors& factors) {
  constexpr int kBatch = 8;  // loads in flight
  constexpr int64_t kSize = sizeof(S);
  ValuesOf<S> stack[kMaxSlots];
  int depth = 0;
  for (int first = 0; first < call.num_pushes; first += kBatch) {
    Pack packs[kBatch];
    TBIK_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      if (first + j < call.num_pushes) {
        const Push push = call.pushes[first + j];
        packs[j] = *reinterpret_cast<const Pack*>(call.segments[push.rank] + offset + push.row * call.pitch * kSize);
      }
    }
    TBIK_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      if (first + j < call.num_pushes) {
        const Push push = call.pushes[first + j];
        ValuesOf<S> leaf = unpack<S>(packs[j]);
        if (factors.at_leaf) scale(leaf, factors.of(push.rank));
        if (call.rounds != 0) round_wire(leaf);
        TBIK_UNROLL
        for (int s = 0; s < kMaxSlots; ++s) {
          if (s == depth) stack[s] = leaf;
        }
        ++depth;
        for (int add = 0; add < push.adds; ++add) {
          TBIK_UNROLL
          for (int s = 0; s + 1 < kMaxSlots; ++s) {
            if (s + 2 == depth) {
              stack[s] = combine(call.op, stack[s], stack[s + 1]);
              if (call.rounds != 0) round_wire(stack[s]);
            }
          }
          --depth;
        }
      }
    }
  }
  return stack[0];
}

// --- one block -----------------------------------------------------------------------------------------------------

// Elements of chunk c of the root, this block's share, to `to` as if its element 0 were the chunk's.
template <class S, int kRanks, class World>
TBIK_HOST_DEVICE void fold_share(const Call& call, const World& world, uint64_t number, int64_t chunk, void* to) {
  using Acc = typename Traits<S>::Acc;
  constexpr int kWidth = Traits<S>::kWidth;
  const Share share = share_of(call, chunk, world.block());
  const Factors factors = factors_of(call, number, world.block());
  const int64_t base = call.staging[number % 2] + staged(call, 0, chunk) * static_cast<int64_t>(sizeof(S));
  const Acc* bias = reinterpret_cast<const Acc*>(call.bias);
  const int64_t first = call.bias_first + chunk * call.chunk_stride;
  for (int64_t i = share.begin + world.thread() * kWidth; i < share.end; i += world.threads() * kWidth) {
    const int64_t offset = base + i * static_cast<int64_t>(sizeof(S));
    ValuesOf<S> root;
    if constexpr (kRanks > 0) {
      root = tree_of_ranks<S, kRanks>(call, offset);
    } else {
      root = run_program<S>(call, offset, factors);
      if (call.op == Op::kPremulSum && !factors.at_leaf) scale(root, call.factor);
    }
    finish(root, call.divisor, bias, bias == nullptr ? 0 : (first + i) % call.columns, call.columns);
    store(to, call.out_element, i, root, static_cast<int>(smaller(kWidth, share.end - i)));
  }
}

// kRanks > 0: sums of one row per rank (Call::is_tree_of_ranks); 0: everything.
template <class S, int kRanks, class World>
TBIK_HOST_DEVICE void peer_reduce(const Call& call, const World& world) {
  Header* own = header_of(call, call.rank);
  const int block = world.block();
  if (world.any(world.load_acquire(&own->failed) != 0)) return;
  const uint64_t number = own->calls[block] + 1;
  const int parity = static_cast<int>(number % 2);
  char* const segment = reinterpret_cast<char*>(call.segments[call.rank]);
  constexpr int64_t kSize = sizeof(S);
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t c = 0; c < call.num_chunks; ++c) {
      const Share share = share_of(call, c, block);
      const char* from =
          reinterpret_cast<const char*>(call.x) + (row * call.row_stride + c * call.chunk_stride + share.begin) * kSize;
      copy(world, segment + call.staging[parity] + (staged(call, row, c) + share.begin) * kSize, from,
           (share.end - share.begin) * kSize);
    }
  }
  if (!meet(call, world, number, Phase::kInputs)) return;
  char* const out = reinterpret_cast<char*>(call.out);
  if (call.placement != Placement::kTwoShot) {
    fold_share<S, kRanks>(call, world, number, call.placement == Placement::kScatter ? call.rank : 0, out);
  } else {
    fold_share<S, kRanks>(call, world, number, call.rank, segment + call.results[parity]);
    if (!meet(call, world, number, Phase::kResults)) return;
    const int64_t size = bytes_of(call.out_element);
    for (int k = 0; k < call.size; ++k) {
      const int c = (call.rank + k) % call.size;  // not all from the same rank at once
      const Share share = share_of(call, c, block);
      const char* from = reinterpret_cast<const char*>(call.segments[c]) + call.results[parity] + share.begin * size;
      copy(world, out + (c * call.chunk_stride + share.begin) * size, from, (share.end - share.begin) * size);
    }
  }
  world.sync();
  for (int c = block + call.blocks * world.thread(); c < kMaxBlocks; c += call.blocks * world.threads()) {
    own->calls[c] = number;
  }
}

}  // namespace tbik::peer
