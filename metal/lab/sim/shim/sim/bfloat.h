// bfloat by the language's rules: it becomes float by itself, but no float or half becomes a bfloat without being asked. Arithmetic
// of two bfloats is rounded after every operation; with a float it is arithmetic of floats.
#pragma once

template <bool, class T> struct __sim_only_if {};
template <class T> struct __sim_only_if<true, T> { using type = T; };
#define SIM_BFLOAT __attribute__((always_inline, nodebug)) constexpr

struct bfloat {
  __bf16 __value;
  bfloat() = default;
  SIM_BFLOAT explicit bfloat(__bf16 v) : __value(v) {}
  SIM_BFLOAT explicit bfloat(float f) : __value((__bf16)f) {}
  SIM_BFLOAT explicit bfloat(_Float16 h) : __value((__bf16)(float)h) {}
  template <class I, class = typename __sim_only_if<__is_integral(I) || __is_enum(I), I>::type>
  SIM_BFLOAT bfloat(I i) : __value((__bf16)(float)i) {}
  SIM_BFLOAT operator float() const { return (float)__value; }
  SIM_BFLOAT bfloat operator-() const { return bfloat(-__value); }
  SIM_BFLOAT bfloat operator+() const { return *this; }
  SIM_BFLOAT bfloat& operator++() { return *this = bfloat((float)__value + 1.0f); }
  SIM_BFLOAT bfloat& operator--() { return *this = bfloat((float)__value - 1.0f); }
  SIM_BFLOAT bfloat operator++(int) { bfloat old = *this; ++*this; return old; }
  SIM_BFLOAT bfloat operator--(int) { bfloat old = *this; --*this; return old; }

  // Friends, not functions of the namespace: clang reads a swizzle in a template wrongly if it finds an operator before the types
  // are known.
#define SIM_BFLOAT_OP(op)                                                                                                \
  friend SIM_BFLOAT bfloat operator op(bfloat a, bfloat b) { return bfloat((float)a op (float)b); }                      \
  template <class I> friend SIM_BFLOAT typename __sim_only_if<__is_integral(I), bfloat>::type operator op(bfloat a, I b) { return a op bfloat(b); } \
  template <class I> friend SIM_BFLOAT typename __sim_only_if<__is_integral(I), bfloat>::type operator op(I a, bfloat b) { return bfloat(a) op b; } \
  friend SIM_BFLOAT bfloat& operator op##=(bfloat& a, bfloat b) { return a = a op b; }
  SIM_BFLOAT_OP(+) SIM_BFLOAT_OP(-) SIM_BFLOAT_OP(*) SIM_BFLOAT_OP(/)
#undef SIM_BFLOAT_OP
};
#undef SIM_BFLOAT
