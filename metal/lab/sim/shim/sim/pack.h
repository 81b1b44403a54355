// Vectors of numbers between 0 and 1, or -1 and 1, in the bits of an integer, and back.
#pragma once
#include "sim/integer.h"

namespace metal {
// The nearest of `most` steps of 1; what is no number is 0. As bits of an unsigned integer.
SIM_FN uint __unorm(float v, float most) { return uint(__builtin_rintf(saturate(v) * most)); }
SIM_FN uint __snorm(float v, float most) {
  return v == v ? uint(int(__builtin_rintf(__builtin_fminf(__builtin_fmaxf(v, -1.0f), 1.0f) * most))) : 0; }
SIM_FN float __to_srgb(float v) { return v != v || v <= 0 ? 0.0f : v < 0.0031308f ? 12.92f * v : 1.055f * powf(v, 1.0f / 2.4f) - 0.055f; }
SIM_FN float __from_srgb(float v) { return v <= 0.04045f ? v / 12.92f : powf((v + 0.055f) / 1.055f, 2.4f); }
SIM_FN uint __field(uint packed, uint low, uint bits) { return packed >> low & ((1u << bits) - 1); }
SIM_FN float __signed_field(uint packed, uint low, uint bits, float most) {
  return __builtin_fmaxf(float(int(packed << (32 - low - bits)) >> (32 - bits)) / most, -1.0f); }

#define SIM_PACK(to, pack, pack_srgb, T)                                                                              \
  template <class V = vec<T, 4>> SIM_FN uint pack##_unorm4x8(__same<V> v) {                                                 \
    return __unorm(v[0], 255) | __unorm(v[1], 255) << 8 | __unorm(v[2], 255) << 16 | __unorm(v[3], 255) << 24; }            \
  template <class V = vec<T, 4>> SIM_FN uint pack##_snorm4x8(__same<V> v) {                                                 \
    return (__snorm(v[0], 127) & 255) | (__snorm(v[1], 127) & 255) << 8 | (__snorm(v[2], 127) & 255) << 16 | __snorm(v[3], 127) << 24; } \
  template <class V = vec<T, 4>> SIM_FN uint pack_srgb(__same<V> v) {                                                       \
    return __unorm(__to_srgb(v[0]), 255) | __unorm(__to_srgb(v[1]), 255) << 8 | __unorm(__to_srgb(v[2]), 255) << 16 |       \
           __unorm(v[3], 255) << 24; }                                                                                      \
  template <class V = vec<T, 2>> SIM_FN uint pack##_unorm2x16(__same<V> v) { return __unorm(v[0], 65535) | __unorm(v[1], 65535) << 16; } \
  template <class V = vec<T, 2>> SIM_FN uint pack##_snorm2x16(__same<V> v) { return (__snorm(v[0], 32767) & 65535) | __snorm(v[1], 32767) << 16; } \
  template <class V = vec<T, 4>> SIM_FN uint pack##_unorm10a2(__same<V> v) {                                                \
    return __unorm(v[0], 1023) | __unorm(v[1], 1023) << 10 | __unorm(v[2], 1023) << 20 | __unorm(v[3], 3) << 30; }          \
  template <class V = vec<T, 3>> SIM_FN ushort pack##_unorm565(__same<V> v) {                                               \
    return ushort(__unorm(v[0], 31) | __unorm(v[1], 63) << 5 | __unorm(v[2], 31) << 11); }                                  \
  template <class U = T> SIM_FN vec<U, 4> unpack_unorm4x8_to_##to(uint p) {                                                 \
    vec<U, 4> r = {}; for (int i = 0; i < 4; ++i) r[i] = U(float(__field(p, 8 * i, 8)) / 255.0f); return r; }               \
  template <class U = T> SIM_FN vec<U, 4> unpack_snorm4x8_to_##to(uint p) {                                                 \
    vec<U, 4> r = {}; for (int i = 0; i < 4; ++i) r[i] = U(__signed_field(p, 8 * i, 8, 127)); return r; }                   \
  template <class U = T> SIM_FN vec<U, 4> unpack_unorm4x8_srgb_to_##to(uint p) {                                            \
    vec<U, 4> r = {}; for (int i = 0; i < 4; ++i) { float f = float(__field(p, 8 * i, 8)) / 255.0f; r[i] = U(i < 3 ? __from_srgb(f) : f); } return r; } \
  template <class U = T> SIM_FN vec<U, 2> unpack_unorm2x16_to_##to(uint p) {                                                \
    vec<U, 2> r = {}; for (int i = 0; i < 2; ++i) r[i] = U(float(__field(p, 16 * i, 16)) / 65535.0f); return r; }           \
  template <class U = T> SIM_FN vec<U, 2> unpack_snorm2x16_to_##to(uint p) {                                                \
    vec<U, 2> r = {}; for (int i = 0; i < 2; ++i) r[i] = U(__signed_field(p, 16 * i, 16, 32767)); return r; }               \
  template <class U = T> SIM_FN vec<U, 4> unpack_unorm10a2_to_##to(uint p) {                                                \
    return vec<U, 4>(U(float(__field(p, 0, 10)) / 1023.0f), U(float(__field(p, 10, 10)) / 1023.0f),                         \
                     U(float(__field(p, 20, 10)) / 1023.0f), U(float(__field(p, 30, 2)) / 3.0f)); }                         \
  template <class U = T> SIM_FN vec<U, 3> unpack_unorm565_to_##to(ushort p) {                                               \
    return vec<U, 3>(U(float(__field(p, 0, 5)) / 31.0f), U(float(__field(p, 5, 6)) / 63.0f), U(float(__field(p, 11, 5)) / 31.0f)); }
SIM_PACK(float, pack_float_to, pack_float_to_srgb_unorm4x8, float)
SIM_PACK(half, pack_half_to, pack_half_to_srgb_unorm4x8, half)
#undef SIM_PACK
}  // namespace metal
