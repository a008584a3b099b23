// Controls of libspmmd_cuda_fake.so, which stands in for libspmmd_cuda.so on machines without a GPU: its devices are
// host memory, its kernels plain loops, and it can be told to fail: by the functions below, or, once the file named by
// the environment variable SPMMD_FAKE_CUDA_BREAK_FILE exists, as by fake_cuda_break() on all devices. It has as many
// devices as SPMMD_FAKE_CUDA_DEVICES says, 1 by default. Found with dlsym in the library that is loaded.
#ifndef SPMMD_TESTS_SERVER_DEVICE_FAKE_CUDA_H_
#define SPMMD_TESTS_SERVER_DEVICE_FAKE_CUDA_H_

#include <cstdint>

extern "C" {
// From here on every call on the device fails as after an illegal address, until fake_cuda_repair().
void fake_cuda_break(int32_t device);
void fake_cuda_repair(int32_t device);
// The next `count` launches fail; the device survives.
void fake_cuda_fail_launches(int32_t count);
// From here on no graph can be recorded; 0 ends it.
void fake_cuda_fail_graphs(int32_t fail);
// Replays of graphs since the library was loaded.
int64_t fake_cuda_replays(void);
// Calls of ipc_open without their ipc_close.
int64_t fake_cuda_open_handles(void);
// Bytes of device memory that are allocated now, layers included.
uint64_t fake_cuda_allocated(int32_t device);
// Matmul launches since the library was loaded, and the tokens of the last one.
int64_t fake_cuda_launches(void);
int64_t fake_cuda_last_tokens(void);
// Launches of several layers at once, replays left out.
int64_t fake_cuda_groups(void);
}

#endif  // SPMMD_TESTS_SERVER_DEVICE_FAKE_CUDA_H_
