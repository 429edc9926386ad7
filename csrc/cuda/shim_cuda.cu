// See shim.h. The runtime is linked in (-cudart static): no version of it has to be found.
#include <cuda_runtime.h>

#include <cstring>

#include "kernels.h"
#include "shim_common.h"

namespace tbik::peer {

namespace {

// The caller's device is current again afterwards.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    error = cudaGetDevice(&before_);
    if (error == cudaSuccess) error = cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaError_t error = cudaSuccess;

 private:
  int before_ = 0;
};

template <class Body>
int on_device(int device, const Body& body) {
  const OnDevice here(device);
  if (here.error != cudaSuccess) return here.error;
  const cudaError_t error = body();
  if (error != cudaSuccess) cudaGetLastError();  // it is reported here, not by whoever asks next
  return error;
}

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

static_assert(sizeof(cudaIpcMemHandle_t) == kHandleBytes);

Kernel kernel_of_call(const Call& call) {
  const int ranks = unrolled_ranks(call);
  switch (call.element) {
    case Element::kFloat32:
      return kernel_float32(ranks);
    case Element::kFloat64:
      return kernel_float64(ranks);
    case Element::kBFloat16:
      return kernel_bfloat16(ranks);
    case Element::kFloat16:
      return kernel_float16(ranks);
    case Element::kInt32:
      return kernel_int32();
    case Element::kInt64:
      return kernel_int64();
  }
  return nullptr;
}

}  // namespace

}  // namespace tbik::peer

using namespace tbik::peer;

const char* tbik_peer_error(int error) {
  return error == kRefused ? last_refusal().c_str() : cudaGetErrorString(static_cast<cudaError_t>(error));
}

int tbik_peer_device_count(int* count) { return cudaGetDeviceCount(count); }

int tbik_peer_device_name(int device, char* name) {
  memset(name, 0, kNameBytes);
  return cudaDeviceGetPCIBusId(name, kNameBytes, device);
}

int tbik_peer_can_access(int device, int peer, int* can) {
  *can = 1;
  return device == peer ? 0 : cudaDeviceCanAccessPeer(can, device, peer);
}

int tbik_peer_allocate(int device, int64_t bytes, uint64_t* address, char* handle) {
  return on_device(device, [&] {
    void* memory = nullptr;
    cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(bytes));
    if (error != cudaSuccess) return error;
    error = cudaMemset(memory, 0, static_cast<size_t>(bytes));
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    cudaIpcMemHandle_t ipc;
    if (error == cudaSuccess) error = cudaIpcGetMemHandle(&ipc, memory);
    if (error != cudaSuccess) {
      cudaFree(memory);
      return error;
    }
    memcpy(handle, &ipc, sizeof ipc);
    *address = reinterpret_cast<uint64_t>(memory);
    return error;
  });
}

int tbik_peer_seal(int, uint64_t) { return 0; }

int tbik_peer_free(int device, uint64_t address) {
  return on_device(device, [&] { return cudaFree(pointer(address)); });
}

int tbik_peer_open(int device, const char* handle, int64_t, uint64_t* address) {
  return on_device(device, [&] {
    cudaIpcMemHandle_t ipc;
    memcpy(&ipc, handle, sizeof ipc);
    void* memory = nullptr;
    const cudaError_t error = cudaIpcOpenMemHandle(&memory, ipc, cudaIpcMemLazyEnablePeerAccess);
    *address = reinterpret_cast<uint64_t>(memory);
    return error;
  });
}

int tbik_peer_close(int device, uint64_t address) {
  return on_device(device, [&] { return cudaIpcCloseMemHandle(pointer(address)); });
}

int tbik_peer_status_allocate(int device, Status** host, uint64_t* address) {
  return on_device(device, [&] {
    void* memory = nullptr;
    cudaError_t error = cudaHostAlloc(&memory, sizeof(Status), cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess) return error;
    memset(memory, 0, sizeof(Status));
    void* seen = nullptr;
    error = cudaHostGetDevicePointer(&seen, memory, 0);
    *host = static_cast<Status*>(memory);
    *address = reinterpret_cast<uint64_t>(seen);
    return error;
  });
}

int tbik_peer_status_free(int device, Status* host) {
  return on_device(device, [&] { return cudaFreeHost(host); });
}

int tbik_peer_launch(int device, const Call* call, uint64_t stream) {
  const Kernel kernel = kernel_of_call(*call);
  if (kernel == nullptr) return refuse("no kernel for element type " + std::to_string(static_cast<int>(call->element)));
  return on_device(device, [&] {
    Call copy = *call;
    void* arguments[] = {&copy};
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(call->blocks)),
                            dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(pointer(stream)));
  });
}

int tbik_peer_synchronize(int device) {
  return on_device(device, [] { return cudaDeviceSynchronize(); });
}
