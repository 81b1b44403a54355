// Enough of Metal's language, said in CUDA, for the kernels of this folder: a simdgroup is a warp, a threadgroup a block.
// The host (cuda.py) takes Metal's address spaces out of the text and declares arrays in threadgroup memory __shared__.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/cstdint>

using cuda::std::int64_t;
using uint = unsigned int;
using ushort = unsigned short;

template <typename T, int N>
struct alignas(N * sizeof(T)) vec {
  T at[N];
  __device__ const T& operator[](int i) const { return at[i]; }
};

__device__ __forceinline__ float simd_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ float simd_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

template <typename T>
__device__ __forceinline__ T simd_shuffle(T x, ushort lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

template <typename T>
__device__ __forceinline__ T simd_broadcast(T x, ushort lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

template <typename T>
__device__ __forceinline__ T simd_shuffle_xor(T x, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

__device__ __forceinline__ int clamp(int x, int low, int high) { return min(max(x, low), high); }

enum class mem_flags { mem_threadgroup };
__device__ __forceinline__ void threadgroup_barrier(mem_flags) { __syncthreads(); }

namespace fast {
__device__ __forceinline__ float exp(float x) { return __expf(x); }
}
namespace precise {
__device__ __forceinline__ float tanh(float x) { return tanhf(x); }
}

#define UNROLL _Pragma("unroll")
#define inline __device__ __forceinline__
