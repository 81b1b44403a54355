// What C++ leaves undefined and Metal does too: misaligned vectors, signed overflow, division by zero, an index
// outside a thread's own array. The compiler calls these (its undefined-behaviour sanitizer) with the place in the text.
#include <stdio.h>
#include <string.h>

#include "state.h"

namespace {
struct Place { const char* file; uint32_t line, column; };
struct TypeName { uint16_t kind, info; char name[1]; };
struct Mismatch { Place place; const TypeName* type; uint8_t log_align, kind; };
struct Overflow { Place place; const TypeName* type; };
struct Bounds { Place place; const TypeName* array; const TypeName* index; };

void report(uint32_t kind, const Place& place, uintptr_t pc, const char* what, const TypeName* type) {
  Finding* f = add_finding(kind, pc, kNone, kNone, 0, 0, false);
  if (!f) return;
  f->line = place.line;
  snprintf(f->text, sizeof f->text, "%s %s", what, type ? type->name : "");
}
}  // namespace

#define SIM_CALLER ((uintptr_t)__builtin_return_address(0))
extern "C" {
void __ubsan_handle_type_mismatch_v1(Mismatch* d, uintptr_t) {
  report(SIM_FAULT_MISALIGNED, d->place, SIM_CALLER, "address is not aligned for", d->type);
  abandon_launch();
}
void __ubsan_handle_add_overflow(Overflow* d, uintptr_t, uintptr_t) { report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, "sum overflows", d->type); }
void __ubsan_handle_sub_overflow(Overflow* d, uintptr_t, uintptr_t) { report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, "difference overflows", d->type); }
void __ubsan_handle_mul_overflow(Overflow* d, uintptr_t, uintptr_t) { report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, "product overflows", d->type); }
void __ubsan_handle_negate_overflow(Overflow* d, uintptr_t) { report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, "negation overflows", d->type); }
void __ubsan_handle_divrem_overflow(Overflow* d, uintptr_t, uintptr_t) {
  report(SIM_FAULT_ARITHMETIC, d->place, SIM_CALLER, "division by zero in", d->type);
  abandon_launch();
}
void __ubsan_handle_out_of_bounds(Bounds* d, uintptr_t index) {
  Finding* f = add_finding(SIM_FAULT_OUT_OF_BOUNDS, SIM_CALLER, kNone, kNone, (int64_t)index, 0, false);
  if (f) {
    f->line = d->place.line;
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
}
