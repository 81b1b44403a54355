// Enough of Metal's language, said in C++ for OpenCL, for kernels to be read by Mesa's compiler for Apple GPUs.
// Address spaces are keywords there, too: device is __global, thread __private, threadgroup __local. constant is one.

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define thread __private
#define threadgroup __local

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef half float16_t;

// A bfloat16 is the upper half of a float. No GPU of this family computes with it: a load shifts, a store rounds.
struct bfloat16_t {
  ushort bits;

  bfloat16_t() = default;
  bfloat16_t(float x) : bits(rounded(x)) {}
  bfloat16_t(const __global bfloat16_t& other) : bits(other.bits) {}
  bfloat16_t(const __private bfloat16_t& other) = default;
  bfloat16_t(const __local bfloat16_t& other) : bits(other.bits) {}

  __global bfloat16_t& operator=(const bfloat16_t& other) __global {
    bits = other.bits;
    return *this;
  }
  __private bfloat16_t& operator=(const bfloat16_t& other) __private {
    bits = other.bits;
    return *this;
  }
  __local bfloat16_t& operator=(const bfloat16_t& other) __local {
    bits = other.bits;
    return *this;
  }
  operator float() const __private { return as_float((uint)bits << 16); }
  operator float() const __global { return as_float((uint)bits << 16); }
  operator float() const __local { return as_float((uint)bits << 16); }

  static ushort rounded(float x) {
    const uint whole = as_uint(x);
    return isnan(x) ? 0x7fc0 : (ushort)((whole + ((whole >> 16) & 1) + 0x7fff) >> 16);
  }
};

template <typename T, int N>
struct vec_of {
  typedef T type __attribute__((ext_vector_type(N)));
};

// A vector of bfloat16: one vector load of its bits.
template <int N>
struct vec_of<bfloat16_t, N> {
  struct type {
    typedef ushort bits_type __attribute__((ext_vector_type(N)));
    bfloat16_t numbers[N];

    type() = default;
    type(const __private type& other) = default;
    type(const __global type& other) {
      const bits_type loaded = *(const __global bits_type*)&other;
      for (int i = 0; i < N; i++) numbers[i].bits = loaded[i];
    }
    type(const __local type& other) {
      const bits_type loaded = *(const __local bits_type*)&other;
      for (int i = 0; i < N; i++) numbers[i].bits = loaded[i];
    }
    __private bfloat16_t& operator[](int i) __private { return numbers[i]; }
    const __private bfloat16_t& operator[](int i) const __private { return numbers[i]; }
  };
};

template <typename T, int N>
using vec = typename vec_of<T, N>::type;

// Metal's `float2(x, y)`, which opencl.py writes as make_vec<float2>(x, y): of its parts, of one number for all, or of
// another vector's numbers converted.
template <typename V, typename A, typename B, typename... More>
inline V make_vec(A a, B b, More... more) {
  return V{a, b, more...};
}
template <typename V, typename U>
inline V make_vec(U x) {
  return (V)(x);
}
#define CONVERTED(T) \
  template <typename V> \
  inline V make_vec(T x) { \
    return __builtin_convertvector(x, V); \
  }
#define CONVERTED_OF(T) CONVERTED(T##2) CONVERTED(T##3) CONVERTED(T##4)
CONVERTED_OF(float)
CONVERTED_OF(half)
CONVERTED_OF(int)
CONVERTED_OF(uint)
CONVERTED_OF(short)
CONVERTED_OF(ushort)

// The same bits as another type.
template <typename To, typename From>
inline To as_type(From x) {
  return __builtin_astype(x, To);
}

template <typename U>
struct Limits;
template <>
struct Limits<float> {
  static constexpr constant float finite_min = -3.402823466e+38f;
};
template <>
struct Limits<half> {
  static constexpr constant float finite_min = -65504.0f;
};
template <>
struct Limits<bfloat16_t> {
  static constexpr constant float finite_min = -3.38953139e+38f;
};

// The operations of a simdgroup, for the types of which the kernels move values between lanes.
#define FOR_EACH_LANE_TYPE(DEFINE) DEFINE(float) DEFINE(half) DEFINE(int) DEFINE(uint) DEFINE(short) DEFINE(ushort)
#define LANE_OPERATIONS(T) \
  inline T simd_sum(T x) { return sub_group_reduce_add(x); } \
  inline T simd_max(T x) { return sub_group_reduce_max(x); } \
  inline T simd_min(T x) { return sub_group_reduce_min(x); } \
  inline T simd_prefix_exclusive_sum(T x) { return sub_group_scan_exclusive_add(x); } \
  inline T simd_broadcast(T x, ushort lane) { return sub_group_broadcast(x, (uint)lane); } \
  inline T simd_shuffle(T x, ushort lane) { return sub_group_shuffle(x, (uint)lane); } \
  inline T simd_shuffle_xor(T x, ushort mask) { return sub_group_shuffle_xor(x, (uint)mask); } \
  inline T simd_shuffle_up(T x, ushort by) { return sub_group_shuffle_up(x, (uint)by); } \
  inline T simd_shuffle_down(T x, ushort by) { return sub_group_shuffle_down(x, (uint)by); }
FOR_EACH_LANE_TYPE(LANE_OPERATIONS)

enum class mem_flags { mem_none, mem_threadgroup, mem_device };
#define threadgroup_barrier(flags) work_group_barrier(CLK_LOCAL_MEM_FENCE)
#define simdgroup_barrier(flags) sub_group_barrier(CLK_LOCAL_MEM_FENCE)

namespace fast {
inline float exp(float x) { return native_exp2(x * 1.44269504f); }
inline float exp2(float x) { return native_exp2(x); }
inline float log2(float x) { return native_log2(x); }
inline float divide(float x, float y) { return x * native_recip(y); }
}  // namespace fast
// The compiler has no library of functions behind it. What Apple's does here is not known; these cost about as much.
namespace precise {
inline float exp(float x) { return native_exp2(x * 1.44269504f); }
inline float tanh(float x) { return copysign(1.0f - 2.0f / (exp(2.0f * fabs(x)) + 1.0f), x); }
}  // namespace precise

// An 8 x 8 matrix over the lanes of a simdgroup, two neighbours of a row in each lane, as it lies in registers.
#define MATRIX_SUM(NAME, A, B, C) \
  extern "C" C nir_simd_matrix_agx__##NAME(A a, B b, C c); \
  inline C matrix_sum(A a, B b, C c) { return nir_simd_matrix_agx__##NAME(a, b, c); }
MATRIX_SUM(fff, float2, float2, float2)
MATRIX_SUM(hff, half2, float2, float2)
MATRIX_SUM(fhf, float2, half2, float2)
MATRIX_SUM(hhf, half2, half2, float2)
MATRIX_SUM(hhh, half2, half2, half2)

// What a matrix has in its registers: these GPUs multiply no bfloat16.
template <typename T>
struct matrix_element {
  typedef T type;
};
template <>
struct matrix_element<bfloat16_t> {
  typedef float type;
};

template <typename T, int ROWS = 8, int COLUMNS = 8>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLUMNS == 8, "a matrix of a simdgroup has 8 rows and 8 columns");
  typedef vec<typename matrix_element<T>::type, 2> pair;
  pair elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T x) : elements((typename matrix_element<T>::type)x) {}
  thread pair& thread_elements() __private { return elements; }

  static uint row() {
    const uint lane = get_sub_group_local_id();
    return ((lane >> 2) & 4) + ((lane >> 1) & 3);
  }
  static uint column() {
    const uint lane = get_sub_group_local_id();
    return ((lane >> 1) & 4) + ((lane << 1) & 2);
  }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;

template <typename T, int ROWS, int COLUMNS>
inline simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T x) {
  return simdgroup_matrix<T, ROWS, COLUMNS>(x);
}

template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D>& d,
    const thread simdgroup_matrix<A>& a,
    const thread simdgroup_matrix<B>& b,
    const thread simdgroup_matrix<C>& c) {
  d.elements = matrix_sum(a.elements, b.elements, c.elements);
}
template <typename D, typename A, typename B>
inline void simdgroup_multiply(
    thread simdgroup_matrix<D>& d, const thread simdgroup_matrix<A>& a, const thread simdgroup_matrix<B>& b) {
  d.elements = matrix_sum(a.elements, b.elements, (vec<D, 2>)(0));
}

#define MATRIX_ACCESS(SPACE) \
  template <typename T> \
  inline void simdgroup_load( \
      thread simdgroup_matrix<T>& d, const SPACE T* at, ulong stride = 8, ulong2 origin = 0, bool transpose = false) { \
    const ulong row = (transpose ? d.column() : d.row()) + origin.y; \
    const ulong column = (transpose ? d.row() : d.column()) + origin.x; \
    const SPACE T* first = at + row * stride + column; \
    if (transpose) { \
      d.elements.x = first[0], d.elements.y = first[stride]; \
    } else { \
      const vec<T, 2> loaded = *(const SPACE vec<T, 2>*)first; \
      d.elements.x = loaded[0], d.elements.y = loaded[1]; \
    } \
  } \
  template <typename T> \
  inline void simdgroup_store( \
      const thread simdgroup_matrix<T>& d, SPACE T* at, ulong stride = 8, ulong2 origin = 0) { \
    SPACE T* first = at + (d.row() + origin.y) * stride + d.column() + origin.x; \
    first[0] = T(d.elements.x), first[1] = T(d.elements.y); \
  }
MATRIX_ACCESS(device)
MATRIX_ACCESS(threadgroup)

namespace metal {
using namespace ::fast;
}
