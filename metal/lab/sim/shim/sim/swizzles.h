// Swizzles as properties (-fdeclspec): names that take no storage and call a function to read and one to write. A name with a
// component twice can be read only: what would write it does not compile. The class around them has __whole() and __set(lanes), all
// components as one of clang's vectors, and operator[].
#pragma once

namespace metal { enum { __at_x, __at_y, __at_z, __at_w }; }
#define SIM_COLOUR_x r
#define SIM_COLOUR_y g
#define SIM_COLOUR_z b
#define SIM_COLOUR_w a
#define SIM_PASTE(a, b, c, d) a##b##c##d
#define SIM_COLOURS(a, b, c, d) SIM_PASTE(a, b, c, d)

#define SIM_SWIZZLE(count, name, colours, ...)                                                                         \
  SIM_VEC vec<T, count> __get_##name() const {                                                                         \
    const auto lanes = __whole(); return vec<T, count>::__of(__builtin_shufflevector(lanes, lanes, __VA_ARGS__)); }    \
  SIM_VEC void __put_##name(vec<T, count> v) & { auto lanes = __whole(); lanes.name = v.__whole(); __set(lanes); }      \
  __declspec(property(get = __get_##name, put = __put_##name)) vec<T, count> name;                                     \
  __declspec(property(get = __get_##name, put = __put_##name)) vec<T, count> colours;
#define SIM_SWIZZLE_(...) SIM_SWIZZLE(__VA_ARGS__)
#define SIM_1(a)                                                                                       \
  SIM_VEC T __get_##a() const { return T(__whole()[__at_##a]); }                                       \
  SIM_VEC void __put_##a(T v) & { __element(__at_##a) = v; }                                           \
  __declspec(property(get = __get_##a, put = __put_##a)) T a;                                          \
  __declspec(property(get = __get_##a, put = __put_##a)) T SIM_COLOURS(SIM_COLOUR_##a, , , );
#define SIM_2(a, b) SIM_SWIZZLE_(2, a##b, SIM_COLOURS(SIM_COLOUR_##a, SIM_COLOUR_##b, , ), __at_##a, __at_##b)
#define SIM_3(a, b, c) \
  SIM_SWIZZLE_(3, a##b##c, SIM_COLOURS(SIM_COLOUR_##a, SIM_COLOUR_##b, SIM_COLOUR_##c, ), __at_##a, __at_##b, __at_##c)
#define SIM_4(a, b, c, d)                                                                                            \
  SIM_SWIZZLE_(4, a##b##c##d, SIM_COLOURS(SIM_COLOUR_##a, SIM_COLOUR_##b, SIM_COLOUR_##c, SIM_COLOUR_##d), __at_##a, \
               __at_##b, __at_##c, __at_##d)

// X(..., x) X(..., y) and so on for the components of a vector of 2, 3 and 4, once for each place of a name (a macro does not
// expand within itself).
#define SIM_A2(X) X(x) X(y)
#define SIM_A3(X) SIM_A2(X) X(z)
#define SIM_A4(X) SIM_A3(X) X(w)
#define SIM_B2(X, a) X(a, x) X(a, y)
#define SIM_B3(X, a) SIM_B2(X, a) X(a, z)
#define SIM_B4(X, a) SIM_B3(X, a) X(a, w)
#define SIM_C2(X, a, b) X(a, b, x) X(a, b, y)
#define SIM_C3(X, a, b) SIM_C2(X, a, b) X(a, b, z)
#define SIM_C4(X, a, b) SIM_C3(X, a, b) X(a, b, w)
#define SIM_D2(X, a, b, c) X(a, b, c, x) X(a, b, c, y)
#define SIM_D3(X, a, b, c) SIM_D2(X, a, b, c) X(a, b, c, z)
#define SIM_D4(X, a, b, c) SIM_D3(X, a, b, c) X(a, b, c, w)

#define SIM_FROM2_1(a) SIM_1(a) SIM_B2(SIM_FROM2_2, a)
#define SIM_FROM2_2(a, b) SIM_2(a, b) SIM_C2(SIM_FROM2_3, a, b)
#define SIM_FROM2_3(a, b, c) SIM_3(a, b, c) SIM_D2(SIM_4, a, b, c)
#define SIM_FROM3_1(a) SIM_1(a) SIM_B3(SIM_FROM3_2, a)
#define SIM_FROM3_2(a, b) SIM_2(a, b) SIM_C3(SIM_FROM3_3, a, b)
#define SIM_FROM3_3(a, b, c) SIM_3(a, b, c) SIM_D3(SIM_4, a, b, c)
#define SIM_FROM4_1(a) SIM_1(a) SIM_B4(SIM_FROM4_2, a)
#define SIM_FROM4_2(a, b) SIM_2(a, b) SIM_C4(SIM_FROM4_3, a, b)
#define SIM_FROM4_3(a, b, c) SIM_3(a, b, c) SIM_D4(SIM_4, a, b, c)
#define SIM_SWIZZLES2 SIM_A2(SIM_FROM2_1)
#define SIM_SWIZZLES3 SIM_A3(SIM_FROM3_1)
#define SIM_SWIZZLES4 SIM_A4(SIM_FROM4_1)
