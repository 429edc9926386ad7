// The C interface of the peer-memory reductions, without torch: tbik/peer_memory.py loads it with ctypes. Two libraries
// have it: _C_cuda (shim_cuda.cu) and, for tests and dry runs without a GPU, _C (shim_host.cpp: memory of the host,
// blocks one after another on the caller's thread).
//
// Every function returns 0, or a number that tbik_peer_error turns into text (any thread; valid until the thread's next
// call). device: the ordinal in this process. stream: a cudaStream_t. Addresses are the device's.
#pragma once

#include <cstdint>

#define TBIK_PEER_EXPORT extern "C" __attribute__((visibility("default")))

namespace tbik::peer {
inline constexpr int64_t kHandleBytes = 64;
inline constexpr int64_t kNameBytes = 64;
struct Call;
struct Status;
}  // namespace tbik::peer

TBIK_PEER_EXPORT const char* tbik_peer_error(int error);

// sizes[0..5]: Call, Status, Header, kMaxRanks, kMaxBlocks, kMaxInputs.
TBIK_PEER_EXPORT void tbik_peer_sizes(int64_t* sizes);

TBIK_PEER_EXPORT int tbik_peer_device_count(int* count);
// name: of the physical device, alike in every process that sees it.
TBIK_PEER_EXPORT int tbik_peer_device_name(int device, char* name);
TBIK_PEER_EXPORT int tbik_peer_can_access(int device, int peer, int* can);

// A segment of zeros and the handle by which other processes open it.
TBIK_PEER_EXPORT int tbik_peer_allocate(int device, int64_t bytes, uint64_t* address, char* handle);
// All processes have opened it: nobody else will.
TBIK_PEER_EXPORT int tbik_peer_seal(int device, uint64_t address);
TBIK_PEER_EXPORT int tbik_peer_free(int device, uint64_t address);
TBIK_PEER_EXPORT int tbik_peer_open(int device, const char* handle, int64_t bytes, uint64_t* address);
TBIK_PEER_EXPORT int tbik_peer_close(int device, uint64_t address);

// A Status that the host reads at *host and kernels write at *address.
TBIK_PEER_EXPORT int tbik_peer_status_allocate(int device, tbik::peer::Status** host, uint64_t* address);
TBIK_PEER_EXPORT int tbik_peer_status_free(int device, tbik::peer::Status* host);

// steps: (kind, slot, source) each, kind 0 = load, 1 = add; sources: (rank, row) each.
TBIK_PEER_EXPORT int tbik_peer_set_program(tbik::peer::Call* call, const int64_t* steps, int64_t num_steps,
                                           const int64_t* sources, int64_t num_sources, int rounds);

// One call (see call.h) behind what the stream holds.
TBIK_PEER_EXPORT int tbik_peer_launch(int device, const tbik::peer::Call* call, uint64_t stream);
TBIK_PEER_EXPORT int tbik_peer_synchronize(int device);
