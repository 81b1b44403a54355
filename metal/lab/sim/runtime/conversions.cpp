// The bfloat and half conversions that a compiler calls when the processor has no instruction for them.
#include <stdint.h>
#include <string.h>

#define SIM_SUPPORT extern "C" __attribute__((visibility("hidden"), weak))

static uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

// Round to nearest, ties to even; a NaN stays one.
SIM_SUPPORT __bf16 __truncsfbf2(float f) {
  const uint32_t u = bits_of(f);
  const uint16_t h = f != f ? (uint16_t)((u >> 16) | 64) : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  __bf16 r;
  memcpy(&r, &h, sizeof r);
  return r;
}
SIM_SUPPORT __bf16 __truncdfbf2(double d) { return __truncsfbf2((float)d); }

#ifndef __F16C__
#ifdef __x86_64__
SIM_SUPPORT float __extendhfsf2(_Float16 half) {
  uint16_t h;
  memcpy(&h, &half, sizeof h);
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31;
  uint32_t u = h & 1023;
  if (exponent == 31) {
    u = 0x7f800000 | u << 13;
  } else if (exponent) {
    u = (exponent + 112) << 23 | u << 13;
  } else {
    const float small = (float)u * 0x1p-24f;
    u = bits_of(small);
  }
  u |= sign;
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}
SIM_SUPPORT _Float16 __truncsfhf2(float f) {
  const uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  uint32_t h;
  if (magnitude > 0x7f800000) {
    h = 0x7e00;
  } else if (magnitude >= 0x477ff000) {
    h = 0x7c00;
  } else if (magnitude < 0x38800000) {
    float scaled;
    memcpy(&scaled, &magnitude, sizeof scaled);
    h = bits_of(scaled + 0.5f) - 0x3f000000;
  } else {
    h = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  const uint16_t out = (uint16_t)(h | sign);
  _Float16 r;
  memcpy(&r, &out, sizeof r);
  return r;
}
#endif
#endif
