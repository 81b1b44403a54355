// Switching between the stacks of GPU threads: hand-written where it matters, ucontext elsewhere.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __APPLE__
#define SIM_ASM_NAME "_sim_fiber_switch"
#else
#define SIM_ASM_NAME "sim_fiber_switch"
#endif

#if defined(__x86_64__) && !defined(SIM_UCONTEXT)
extern "C" __attribute__((visibility("hidden"))) void sim_fiber_switch(void** save, void* load);
asm(".text\n.p2align 4\n.globl " SIM_ASM_NAME "\n" SIM_ASM_NAME ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");
static inline void* sim_fiber_prepare(char* top, void (*entry)()) {
  void** sp = (void**)((uintptr_t)top & ~(uintptr_t)15);
  *--sp = nullptr;  // the entry never returns; this keeps the stack aligned as after a call
  *--sp = (void*)entry;
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  return sp;
}
#elif defined(__aarch64__) && !defined(SIM_UCONTEXT)
extern "C" __attribute__((visibility("hidden"))) void sim_fiber_switch(void** save, void* load);
asm(".text\n.p2align 2\n.globl " SIM_ASM_NAME "\n" SIM_ASM_NAME ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
static inline void* sim_fiber_prepare(char* top, void (*entry)()) {
  char* sp = (char*)((uintptr_t)top & ~(uintptr_t)15) - 160;
  __builtin_memset(sp, 0, 160);
  *(void**)(sp + 88) = (void*)entry;
  return sp;
}
#else
#include <stdlib.h>
#include <ucontext.h>
struct SimContext { ucontext_t context; };
static inline void sim_fiber_switch(void** save, void* load) {
  if (*save == nullptr) *save = calloc(1, sizeof(SimContext));
  swapcontext(&((SimContext*)*save)->context, &((SimContext*)load)->context);
}
static inline void* sim_fiber_prepare(char* top, void (*entry)()) {
  // The context lives at the top of the stack that it will run on.
  SimContext* c = (SimContext*)(((uintptr_t)top - sizeof(SimContext)) & ~(uintptr_t)63);
  getcontext(&c->context);
  c->context.uc_stack.ss_sp = (char*)c - 49152;
  c->context.uc_stack.ss_size = 49152;
  c->context.uc_link = nullptr;
  makecontext(&c->context, entry, 0);
  return c;
}
#endif
