// Enough of Metal's language, said in CUDA, for the kernels of this folder: a simdgroup is a warp, a threadgroup a block.
// The host (cuda.py) takes Metal's address spaces out of the text and declares arrays in threadgroup memory __shared__.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/cstdint>

using cuda::std::int64_t;
using cuda::std::uint64_t;
using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;

template <typename T, int N>
struct alignas(N * sizeof(T)) vec {
  T at[N];
  __device__ T& operator[](int i) { return at[i]; }
  __device__ const T& operator[](int i) const { return at[i]; }
};

#define half2 vec<half, 2>  // CUDA's own has no numbered elements

template <typename To, typename From>
__device__ __forceinline__ To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

__device__ __forceinline__ float simd_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ int simd_sum(int x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The sum of the lanes before this one.
__device__ __forceinline__ int simd_prefix_exclusive_sum(int x) {
  const int lane = threadIdx.x % 32;
  int sum = x;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_sync(0xffffffffu, sum, lane - step);
    sum += lane >= step ? before : 0;
  }
  return sum - x;
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

// Of an 8 x 8 matrix a lane has two neighbours of a row: by its bits 4, 2 and 1 that row, by 3 and 0 the first's column / 2.
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  vec<T, 2> elements;
  __device__ __forceinline__ vec<T, 2>& thread_elements() { return elements; }
};

template <typename T, int ROWS, int COLUMNS>
__device__ __forceinline__ simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T x) {
  return simdgroup_matrix<T, ROWS, COLUMNS>{{{x, x}}};
}

// sum = a * b + c in float. The lanes of a row tell each other its numbers of a, those of a column theirs of b. (NVIDIA's
// matrix units would round a float factor to 11 bits.)
template <typename A, typename B>
__device__ __forceinline__ void simdgroup_multiply_accumulate(
    simdgroup_matrix<float, 8, 8>& sum, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
    const simdgroup_matrix<float, 8, 8>& c) {
  const int same_row = threadIdx.x & 22, same_column = threadIdx.x & 9;
  float left = c.elements[0], right = c.elements[1];
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const int column = (k & 4) << 1 | (k & 2) >> 1, row = (k & 4) << 2 | (k & 3) << 1;
    const float factor = __shfl_sync(0xffffffffu, float(a.elements[k & 1]), same_row | column);
    left = fma(factor, __shfl_sync(0xffffffffu, float(b.elements[0]), row | same_column), left);
    right = fma(factor, __shfl_sync(0xffffffffu, float(b.elements[1]), row | same_column), right);
  }
  sum.elements[0] = left;
  sum.elements[1] = right;
}

enum class mem_flags { mem_threadgroup };
__device__ __forceinline__ void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ __forceinline__ void simdgroup_barrier(mem_flags) { __syncwarp(); }

namespace fast {
__device__ __forceinline__ float exp(float x) { return __expf(x); }
}
namespace precise {
__device__ __forceinline__ float tanh(float x) { return tanhf(x); }
}

#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define inline __device__ __forceinline__
