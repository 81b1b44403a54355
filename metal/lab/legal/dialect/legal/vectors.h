// Vectors of 2, 3 and 4 elements (MSL 2.2): a class, because Metal's vectors are made by calls and convert by asking.
// There is no vec<T, 8> before Metal 4. Swizzles are properties (frontend.py writes them), so `.lo`, `.s0` and `.xx = ...` do not exist.
// Values are of no interest here: bodies stand only where a constant has to be computed.
#pragma once
#include "legal/scalars.h"

namespace metal {
template <class T, int N> struct vec;
template <class T, int N> struct __packed;

template <class T> struct __shape { static constexpr constant int size = 1; typedef T scalar; static constexpr constant bool is_vec = false; };
template <class T, int N> struct __shape<vec<T, N>> { static constexpr constant int size = N; typedef T scalar; static constexpr constant bool is_vec = true; };
template <class T, int N> struct __shape<__packed<T, N>> { static constexpr constant int size = N; typedef T scalar; static constexpr constant bool is_vec = true; };
template <class T> struct is_vector : bool_constant<__shape<remove_cv_t<T>>::is_vec> {};
template <class T> constexpr constant bool is_vector_v = is_vector<T>::value;
template <class T> struct vec_size : integral_constant<int, __shape<remove_cv_t<T>>::size> {};
template <class T> struct vec_element { typedef typename __shape<T>::scalar type; };
template <class T> using vec_element_t = typename __shape<T>::scalar;

template <class... A> struct __components;
template <> struct __components<> { static constexpr constant int count = 0; };
template <class A, class... R> struct __components<A, R...> {
  static constexpr constant int count = __shape<remove_cv_t<remove_addrspace_t<A>>>::size + __components<R...>::count; };

// What a scalar becomes by itself: not a bfloat, unless it is an integer.
template <class From, class To> constexpr constant bool __implicit =
    (__is_integral(From) || __is_enum(From) || __is_float<From>) &&
    !(is_same<To, bfloat>::value && (is_same<From, float>::value || is_same<From, half>::value)) &&
    !(is_same<To, half>::value && is_same<From, bfloat>::value);
template <class From, class To> constexpr constant bool __only_explicit =
    (__is_integral(From) || __is_float<From>) && !__implicit<From, To>;
template <class T> struct __is_element : bool_constant<__is_float<T> || (__is_integral(T) && sizeof(T) <= 8)> {};

template <class T> constexpr T __zero() { return T(0); }
#define LEGAL_COMPARE(op) friend constexpr vec<bool, __n> operator op(vec, vec) { return vec<bool, __n>(true); }
#define LEGAL_BINARY(op)                                              \
  friend constexpr vec operator op(vec a, vec) { return a; }          \
  thread vec& operator op##=(vec);                                   \
  device vec& operator op##=(vec) device;                             \
  threadgroup vec& operator op##=(vec) threadgroup;
#define LEGAL_INTEGERS(op)                                                                                          \
  template <class I = T, class = enable_if_t<__is_integral(I)>> friend constexpr vec operator op(vec a, vec) { return a; } \
  template <class I = T, class = enable_if_t<__is_integral(I)>> thread vec& operator op##=(vec);                          \
  template <class I = T, class = enable_if_t<__is_integral(I)>> device vec& operator op##=(vec) device;                           

// What a swizzle calls.
#define LEGAL_READ(space)                                                                                         \
  T __get1() const space; vec<T, 2> __get2() const space; vec<T, 3> __get3() const space; vec<T, 4> __get4() const space;
#define LEGAL_WRITE void __put1(T); void __put2(vec<T, 2>); void __put3(vec<T, 3>); void __put4(vec<T, 4>);

#define LEGAL_VECTOR(N, ...)                                                                              \
  template <class T> struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec<T, N> {                             \
    static_assert(__is_element<T>::value, "Metal has vectors of bool, integers, half, bfloat and float"); \
    static constexpr constant int __n = N;                                                                \
    T __VA_ARGS__;                                                                                        \
    LEGAL_SWIZZLES_##N                                                                                    \
    LEGAL_READ() LEGAL_READ(constant) LEGAL_WRITE                                                         \
    vec() = default;                                                                                      \
    constexpr vec() threadgroup : x() {}                                                                  \
    template <class U, class = enable_if_t<__implicit<U, T>>> constexpr vec(U) : x(), LEGAL_REST_##N {}   \
    template <class U, class = enable_if_t<__only_explicit<U, T>>, class = void>                          \
    constexpr explicit vec(U) : x(), LEGAL_REST_##N {}                                                    \
    template <class U, class = enable_if_t<!is_same<U, T>::value>>                                        \
    constexpr explicit vec(vec<U, N>) : x(), LEGAL_REST_##N {}                                            \
    template <class U> constexpr explicit vec(const constant vec<U, N>&) : x(), LEGAL_REST_##N {}         \
    template <class U, class = enable_if_t<is_same<U, T>::value>, class = void>                           \
    constexpr vec(const constant vec<U, N>&) : x(), LEGAL_REST_##N {}                                     \
    template <class A, class B, class... R, class = enable_if_t<__components<A, B, R...>::count == N>>    \
    constexpr vec(A, B, R...) : x(), LEGAL_REST_##N {}                                                    \
    template <class A, class B, class... R, class = enable_if_t<__components<A, B, R...>::count == N>>    \
    constexpr vec(A, B, R...) constant : x(), LEGAL_REST_##N {}                                           \
    template <class U, class = enable_if_t<__implicit<U, T>>>                                             \
    constexpr vec(U) constant : x(), LEGAL_REST_##N {}                                                    \
    constexpr vec(const vec&) = default;                                                                  \
    vec& operator=(const vec&) = default;                                                                 \
    constexpr vec(const vec&) constant : x(), LEGAL_REST_##N {}                                           \
    thread T& operator[](long)&; const thread T& operator[](long) const&; T operator[](long) const&&;     \
    device T& operator[](long) device&; const device T& operator[](long) const device&;                   \
    threadgroup T& operator[](long) threadgroup&; const threadgroup T& operator[](long) const threadgroup&; \
    const constant T& operator[](long) const constant&;                                                   \
    friend constexpr vec operator+(vec a) { return a; }                                                   \
    friend constexpr vec operator-(vec a) { return a; }                                                   \
    friend constexpr vec<bool, N> operator!(vec) { return vec<bool, N>(true); }                           \
    template <class I = T, class = enable_if_t<__is_integral(I)>> friend constexpr vec operator~(vec a) { return a; } \
    thread vec& operator++(); thread vec& operator--(); vec operator++(int); vec operator--(int);   \
    LEGAL_BINARY(+) LEGAL_BINARY(-) LEGAL_BINARY(*) LEGAL_BINARY(/)                                       \
    LEGAL_INTEGERS(%) LEGAL_INTEGERS(&) LEGAL_INTEGERS(|) LEGAL_INTEGERS(^) LEGAL_INTEGERS(<<) LEGAL_INTEGERS(>>) \
    LEGAL_COMPARE(==) LEGAL_COMPARE(!=) LEGAL_COMPARE(<) LEGAL_COMPARE(>) LEGAL_COMPARE(<=) LEGAL_COMPARE(>=) \
    LEGAL_COMPARE(&&) LEGAL_COMPARE(||)                                                                   \
  };
#define LEGAL_REST_2 y()
#define LEGAL_REST_3 y(), z()
#define LEGAL_REST_4 y(), z(), w()
#include "legal/swizzles.h"
LEGAL_VECTOR(2, x, y)
LEGAL_VECTOR(3, x, y, z)
LEGAL_VECTOR(4, x, y, z, w)
#ifdef LEGAL_METAL4
// Eight elements, without names: MLX's kernels for the matrix units of macOS 26 hold fragments in them.
#define LEGAL_SWIZZLES_8
#define LEGAL_REST_8 __data{}
LEGAL_VECTOR(8, x, __data[7])
#endif
#undef LEGAL_VECTOR
#undef LEGAL_COMPARE
#undef LEGAL_BINARY
#undef LEGAL_INTEGERS

// packed_float3 and its kin: the size and alignment of their elements (MSL 2.2.3), swizzles like a vec's, arithmetic of vecs.
#define LEGAL_OPERATOR(where, result, op)                                                                      \
  where friend constexpr result operator op(__packed, __packed) { return result(0); }                         \
  where friend constexpr result operator op(__packed, __vec) { return result(0); }                            \
  where friend constexpr result operator op(__vec, __packed) { return result(0); }                            \
  where friend constexpr result operator op(__packed, T) { return result(0); }                                \
  where friend constexpr result operator op(T, __packed) { return result(0); }
#define LEGAL_UPDATE(where, op)                                                                                \
  where thread __packed& operator op##=(__vec); where device __packed& operator op##=(__vec) device;           \
  where threadgroup __packed& operator op##=(__vec) threadgroup;
#define LEGAL_IF_INTEGER template <class I = T, class = enable_if_t<__is_integral(I)>>
#define LEGAL_BINARY(op) LEGAL_OPERATOR(, __vec, op) LEGAL_UPDATE(, op)
#define LEGAL_INTEGERS(op) LEGAL_OPERATOR(LEGAL_IF_INTEGER, __vec, op) LEGAL_UPDATE(LEGAL_IF_INTEGER, op)
#define LEGAL_COMPARE(op) LEGAL_OPERATOR(, __bools, op)
#define LEGAL_PACKED(N, ...)                                                                                   \
  template <class T> struct __packed<T, N> {                                                                   \
    typedef vec<T, N> __vec; typedef vec<bool, N> __bools;                                                     \
    T __VA_ARGS__;                                                                                             \
    LEGAL_SWIZZLES_##N                                                                                         \
    LEGAL_READ() LEGAL_READ(constant) LEGAL_WRITE                                                              \
    __packed() = default;                                                                                      \
    constexpr __packed(__vec) : x(), LEGAL_REST_##N {}                                                         \
    template <class A, class B, class... R, class = enable_if_t<__components<A, B, R...>::count == N>>         \
    constexpr __packed(A, B, R...) : x(), LEGAL_REST_##N {}                                                    \
    template <class U, class = enable_if_t<__implicit<U, T>>> constexpr explicit __packed(U) : x(), LEGAL_REST_##N {} \
    constexpr operator __vec() const { return __vec(x); }                                                      \
    constexpr operator __vec() const constant { return __vec(x); }                                             \
    template <class U, class = enable_if_t<!is_same<U, T>::value>>                                             \
    constexpr explicit __packed(vec<U, N>) : x(), LEGAL_REST_##N {}                                            \
    template <class U, class = enable_if_t<!is_same<U, T>::value>>                                             \
    constexpr explicit __packed(__packed<U, N>) : x(), LEGAL_REST_##N {}                                       \
    template <class U, class = enable_if_t<!is_same<U, T>::value>>                                             \
    constexpr explicit operator vec<U, N>() const { return vec<U, N>(U(0)); }                                  \
    template <class U, class = enable_if_t<!is_same<U, T>::value>>                                             \
    constexpr explicit operator vec<U, N>() const constant { return vec<U, N>(U(0)); }                         \
    thread T& operator[](long)&; const thread T& operator[](long) const&; T operator[](long) const&&;          \
    device T& operator[](long) device&; const device T& operator[](long) const device&;                        \
    threadgroup T& operator[](long) threadgroup&; const threadgroup T& operator[](long) const threadgroup&;    \
    const constant T& operator[](long) const constant&;                                                        \
    friend __vec operator-(__packed);                                                                          \
    LEGAL_BINARY(+) LEGAL_BINARY(-) LEGAL_BINARY(*) LEGAL_BINARY(/)                                            \
    LEGAL_INTEGERS(%) LEGAL_INTEGERS(&) LEGAL_INTEGERS(|) LEGAL_INTEGERS(^)                                    \
    LEGAL_COMPARE(==) LEGAL_COMPARE(!=) LEGAL_COMPARE(<) LEGAL_COMPARE(>) LEGAL_COMPARE(<=) LEGAL_COMPARE(>=)  \
  };
LEGAL_PACKED(2, x, y)
LEGAL_PACKED(3, x, y, z)
LEGAL_PACKED(4, x, y, z, w)
#undef LEGAL_PACKED
#undef LEGAL_COMPARE
#undef LEGAL_INTEGERS
#undef LEGAL_BINARY
#undef LEGAL_IF_INTEGER
#undef LEGAL_UPDATE
#undef LEGAL_OPERATOR
#undef LEGAL_READ
#undef LEGAL_WRITE
template <class T, int N> using packed_vec = __packed<T, N>;

// as_type: the same bits, of a scalar or vector of the same size (MSL 2.19).
template <class To, class From> constexpr To __as(From) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs two types of the same size");
  return To(0);
}
template <class To, class From> constexpr To as_type(From from) { return __as<To>(from); }
}  // namespace metal
using metal::as_type;

#define LEGAL_NAMES(T)                                                                                        \
  typedef metal::vec<T, 2> T##2; typedef metal::vec<T, 3> T##3; typedef metal::vec<T, 4> T##4;                \
  typedef metal::__packed<T, 2> packed_##T##2; typedef metal::__packed<T, 3> packed_##T##3;                   \
  typedef metal::__packed<T, 4> packed_##T##4;                                                                \
  namespace metal { using ::T##2; using ::T##3; using ::T##4; using ::packed_##T##2; using ::packed_##T##3; using ::packed_##T##4; }
LEGAL_NAMES(bool) LEGAL_NAMES(char) LEGAL_NAMES(uchar) LEGAL_NAMES(short) LEGAL_NAMES(ushort) LEGAL_NAMES(int) LEGAL_NAMES(uint)
LEGAL_NAMES(long) LEGAL_NAMES(ulong) LEGAL_NAMES(half) LEGAL_NAMES(float) LEGAL_NAMES(bfloat)
#undef LEGAL_NAMES

// matrix<T, columns, rows> of half and float (MSL 2.3), in columns. There is no unary minus.
namespace metal {
template <class T, int C, int R> struct matrix {
  static_assert((is_same<T, float>::value || is_same<T, half>::value) && C >= 2 && C <= 4 && R >= 2 && R <= 4, "no such matrix");
  vec<T, R> columns[C];
  matrix() = default;
  constexpr explicit matrix(T) : columns{} {}
  template <class U, class = enable_if_t<!is_same<U, T>::value>> constexpr explicit matrix(matrix<U, C, R>) : columns{} {}
  template <class A, class B, class... Rest, class = enable_if_t<sizeof...(Rest) + 2 == C || sizeof...(Rest) + 2 == C * R>>
  constexpr matrix(A, B, Rest...) : columns{} {}
  thread vec<T, R>& operator[](long)&; const thread vec<T, R>& operator[](long) const&; vec<T, R> operator[](long) const&&;
  device vec<T, R>& operator[](long) device&; const device vec<T, R>& operator[](long) const device&;
  threadgroup vec<T, R>& operator[](long) threadgroup&; const threadgroup vec<T, R>& operator[](long) const threadgroup&;
  const constant vec<T, R>& operator[](long) const constant&;
  friend matrix operator+(matrix, matrix);
  friend matrix operator-(matrix, matrix);
  friend matrix operator*(matrix, T);
  friend matrix operator*(T, matrix);
  friend vec<T, R> operator*(matrix, vec<T, C>);
  friend vec<T, C> operator*(vec<T, R>, matrix);
  friend bool operator==(matrix, matrix);
  friend bool operator!=(matrix, matrix);
#define LEGAL_UPDATES(space)                                                                   \
  space matrix& operator+=(matrix) space; space matrix& operator-=(matrix) space;              \
  space matrix& operator*=(T) space; space matrix& operator*=(matrix<T, C, C>) space;
  LEGAL_UPDATES(thread) LEGAL_UPDATES(device) LEGAL_UPDATES(threadgroup)
#undef LEGAL_UPDATES
};
template <class T, int C, int R, int K> matrix<T, C, R> operator*(matrix<T, K, R>, matrix<T, C, K>);
template <class T, int C, int R> matrix<T, R, C> transpose(matrix<T, C, R>);
template <class T, int N> T determinant(matrix<T, N, N>);
#define LEGAL_MATRICES(T, C) typedef matrix<T, C, 2> T##C##x2; typedef matrix<T, C, 3> T##C##x3; typedef matrix<T, C, 4> T##C##x4;
LEGAL_MATRICES(float, 2) LEGAL_MATRICES(float, 3) LEGAL_MATRICES(float, 4)
LEGAL_MATRICES(half, 2) LEGAL_MATRICES(half, 3) LEGAL_MATRICES(half, 4)
#undef LEGAL_MATRICES
}  // namespace metal
