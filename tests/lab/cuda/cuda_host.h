// CUDA's words on a CPU, for the kernels of metal/: every CUDA thread has a stack of its own, and one runs at a time until
// its warp exchanges numbers or its block meets at a barrier. Put before the text of a kernel by test_dialect.py.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fiber.h"

#define __device__
#define __forceinline__ inline
#define __global__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("cuda_shared"), used))
extern "C" char __start_cuda_shared[] __attribute__((weak)), __stop_cuda_shared[] __attribute__((weak));

using __half = _Float16;
using half = _Float16;
using __nv_bfloat16 = __bf16;
namespace cuda::std {
using ::int64_t;
using ::uint64_t;
}  // namespace cuda::std

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float __expf(float x) { return expf(x); }

struct uint3 {
  unsigned x, y, z;
};
static uint3 blockIdx, threadIdx, gridDim;

namespace host {
constexpr unsigned MOST_THREADS = 1024, STACK = 1 << 16;

struct Thread {
  void* stack_pointer;
  unsigned exchanges;  // how many it has come to
  unsigned barriers;
  bool done;
};

static Thread threads[MOST_THREADS];
static unsigned block_threads, current;
static uint64_t given[2][MOST_THREADS];  // of the exchange before this one somebody may still be reading
static void* scheduler;
static void (*kernel)(void**);
static void** arguments;

inline void yield() { sim_fiber_switch(&threads[current].stack_pointer, scheduler); }

// The number of lane `source` of the warp, of all of whose lanes none goes on before all have come.
template <typename T>
__attribute__((noinline)) T exchange(T x, unsigned source) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "one register or two");
  const unsigned me = current, first = me / 32 * 32, turn = ++threads[me].exchanges;
  memcpy(&given[turn % 2][me], &x, sizeof(T));
  for (unsigned lane = 0; lane < 32; lane++) {
    while (threads[first + lane].exchanges < turn) yield();
  }
  memcpy(&x, &given[turn % 2][first + source % 32], sizeof(T));
  return x;
}

inline void run() {
  kernel(arguments);
  threads[current].done = true;
  for (;;) yield();
}

inline unsigned long progress() {
  unsigned long sum = 0;
  for (unsigned t = 0; t < block_threads; t++) sum += threads[t].exchanges + threads[t].barriers + threads[t].done;
  return sum;
}

// One block; false if threads wait for what never comes.
inline bool run_block(char* stacks) {
  memset(__start_cuda_shared, 0xff, size_t(__stop_cuda_shared - __start_cuda_shared));  // NaN: nobody has written it
  for (unsigned t = 0; t < block_threads; t++) {
    threads[t] = Thread{sim_fiber_prepare(stacks + (t + 1) * size_t(STACK), run), 0, 0, false};
  }
  for (unsigned long before = 0, ended = 0; ended < block_threads; before = progress()) {
    ended = 0;
    for (current = 0; current < block_threads; current++) {
      threadIdx = uint3{current, 0, 0};
      if (!threads[current].done) sim_fiber_switch(&scheduler, threads[current].stack_pointer);
      ended += threads[current].done;
    }
    if (ended < block_threads && progress() == before) return false;
  }
  return true;
}
}  // namespace host

inline void __syncthreads() {
  const unsigned turn = ++host::threads[host::current].barriers;
  for (unsigned t = 0; t < host::block_threads; t++) {
    while (host::threads[t].barriers < turn) host::yield();
  }
}

inline void __syncwarp() { host::exchange(0, 0); }

template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  return host::exchange(x, unsigned(lane));
}

template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return host::exchange(x, host::current % 32 ^ unsigned(mask));
}

// Every block of a launch, one after the other: 0, or 1 if threads of a block parted.
extern "C" int launch(
    void (*kernel)(void**), void** arguments, const unsigned* blocks, unsigned threads) {
  char* stacks = (char*)malloc(size_t(threads) * host::STACK);
  host::kernel = kernel, host::arguments = arguments, host::block_threads = threads;
  bool well = threads <= host::MOST_THREADS && threads % 32 == 0;
  gridDim = {unsigned(blocks[0]), unsigned(blocks[1]), unsigned(blocks[2])};
  for (blockIdx.z = 0; blockIdx.z < blocks[2] && well; blockIdx.z++) {
    for (blockIdx.y = 0; blockIdx.y < blocks[1] && well; blockIdx.y++) {
      for (blockIdx.x = 0; blockIdx.x < blocks[0] && well; blockIdx.x++) well = host::run_block(stacks);
    }
  }
  free(stacks);
  return well ? 0 : 1;
}
