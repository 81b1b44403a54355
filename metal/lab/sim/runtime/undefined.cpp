// What C++ leaves undefined and Metal does too, or what machines do differently: misaligned vectors, signed overflow, division by
// zero, shifts by the whole width, a float that fits no integer, an index outside a thread's own array, an assertion that does not
// hold; and a 64-bit value that is cut to 32 bits without being asked. The compiler calls these (its undefined-behaviour sanitizer)
// with the place in the text.
#include <stdio.h>
#include <string.h>

#include "state.h"

namespace {
struct Place { const char* file; uint32_t line, column; };
struct TypeName { uint16_t kind, info; char name[1]; };
struct Mismatch { Place place; const TypeName* type; uint8_t log_align, kind; };
struct Overflow { Place place; const TypeName* type; };
struct Bounds { Place place; const TypeName* array; const TypeName* index; };
struct Shift { Place place; const TypeName* value; const TypeName* amount; };
struct Conversion { Place place; const TypeName* from; const TypeName* to; };

// The line of the kernel's own text, or 0 for what is inlined from the library: then the caller's address tells.
uint32_t line_of(const Place& place) { return place.file && strcmp(place.file, "kernel") == 0 ? place.line : 0; }
uint32_t bits_of_integer(const TypeName* type) { return type->kind == 0 ? 1u << (type->info >> 1) : 0; }
bool is_signed(const TypeName* type) { return type->info & 1; }
// A value as the compiler hands it over: itself, in the low bits of a word.
long long extended(const TypeName* type, uintptr_t value) {
  const uint32_t unused = 64 - bits_of_integer(type);
  return is_signed(type) ? (long long)(value << unused) >> unused : (long long)(value << unused >> unused);
}

void report(uint32_t kind, const Place& place, uintptr_t pc, const char* what, const TypeName* type) {
  Finding* f = add_finding(kind, pc, kNone, kNone, 0, 0, false);
  if (!f) return;
  f->line = line_of(place);
  snprintf(f->text, sizeof f->text, "%s %s", what, type ? type->name : "");
}
}  // namespace

#define SIM_CALLER ((uintptr_t)__builtin_return_address(0))
extern "C" {
void __ubsan_handle_type_mismatch_v1(Mismatch* d, uintptr_t address) {
  char what[64];
  snprintf(what, sizeof what, "uses an address that is a multiple of %u only as", 1u << __builtin_ctzll(address | 1ull << 31));
  report(SIM_FAULT_MISALIGNED, d->place, SIM_CALLER, what, d->type);
  abandon_launch();
}
void __ubsan_handle_add_overflow(Overflow* d, uintptr_t, uintptr_t) { report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, "sum overflows", d->type); }
void __ubsan_handle_sub_overflow(Overflow* d, uintptr_t, uintptr_t) { report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, "difference overflows", d->type); }
void __ubsan_handle_mul_overflow(Overflow* d, uintptr_t, uintptr_t) { report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, "product overflows", d->type); }
void __ubsan_handle_negate_overflow(Overflow* d, uintptr_t) { report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, "negation overflows", d->type); }
void __ubsan_handle_divrem_overflow(Overflow* d, uintptr_t, uintptr_t divisor) {
  report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, extended(d->type, divisor) ? "quotient overflows" : "division by zero in", d->type);
  abandon_launch();
}
void __ubsan_handle_shift_out_of_bounds(Shift* d, uintptr_t, uintptr_t amount) {
  Finding* f = add_finding(SIM_FAULT_ARITHMETIC, SIM_CALLER, kNone, kNone, 0, 0, false);
  if (!f) return;
  f->line = line_of(d->place);
  snprintf(f->text, sizeof f->text, "shifts %s by %lld", d->value->name, extended(d->amount, amount));
}
void __ubsan_handle_float_cast_overflow(Conversion* d, uintptr_t from) {
  Finding* f = add_finding(SIM_FAULT_ARITHMETIC, SIM_CALLER, kNone, kNone, 0, 0, false);
  if (!f) return;
  f->line = line_of(d->place);
  float value;
  memcpy(&value, &from, sizeof value);
  if (d->from->info == 32) snprintf(f->text, sizeof f->text, "%g does not fit in %s", (double)value, d->to->name);
  else snprintf(f->text, sizeof f->text, "a value of %s does not fit in %s", d->from->name, d->to->name);
}
// Narrower integers are cut on purpose all the time (bytes of a word); offsets have 64 bits.
void __ubsan_handle_implicit_conversion(Conversion* d, uintptr_t from, uintptr_t) {
  if (bits_of_integer(d->from) != 64 || bits_of_integer(d->to) != 32) return;
  const long long value = extended(d->from, from);
  if (value == (int32_t)value || value == (uint32_t)value) return;  // all of it is in the 32 bits: a negative stride as a uint
  Finding* f = add_finding(SIM_FAULT_TRUNCATION, SIM_CALLER, kNone, kNone, 0, 0, false);
  if (!f) return;
  f->line = line_of(d->place);
  snprintf(f->text, sizeof f->text, "%lld becomes a %s of 32 bits without being asked", value, d->to->name);
}
void __ubsan_handle_out_of_bounds(Bounds* d, uintptr_t index) {
  Finding* f = add_finding(SIM_FAULT_OUT_OF_BOUNDS, SIM_CALLER, kNone, kNone, (int64_t)index, 0, false);
  if (f) {
    f->line = line_of(d->place);
    snprintf(f->text, sizeof f->text, "index %lld of %s", (long long)(int)index, d->array->name);
  }
  abandon_launch();
}
void __ubsan_handle_local_out_of_bounds() {
  Finding* f = add_finding(SIM_FAULT_OUT_OF_BOUNDS, SIM_CALLER, kNone, kNone, 0, 0, false);
  if (f) snprintf(f->text, sizeof f->text, "an address past the end of an array of its own");
  abandon_launch();
}
void __ubsan_handle_local_out_of_bounds_abort() { __ubsan_handle_local_out_of_bounds(); }
void sim_assertion(const char* text) {
  Finding* f = add_finding(SIM_FAULT_CRASH, SIM_CALLER, kNone, kNone, 0, 0, false);
  if (f) snprintf(f->text, sizeof f->text, "assertion fails: %s", text);
  abandon_launch();
}
}
