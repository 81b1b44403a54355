// A kernel that touches unmapped memory, divides by zero or outgrows its stack ends its launch, not the process.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "state.h"

namespace {
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int kSignalCount = 4;
sigjmp_buf landing;
struct sigaction previous[kSignalCount];
stack_t previous_stack;
pthread_t launching;
alignas(16) char handler_stack[65536];

bool in_guard(uintptr_t address) {
  const Launch& l = *S.launch;
  const uintptr_t at = address - (uintptr_t)l.stacks;
  return at < (uintptr_t)kMaxThreads * l.stack_bytes && at % l.stack_bytes < 16384;
}

void on_signal(int signal, siginfo_t* info, void*) {
  if (!pthread_equal(pthread_self(), launching)) {
    // Another thread's own trouble: let it meet it again with whoever was in charge before.
    for (int i = 0; i < kSignalCount; ++i)
      if (kSignals[i] == signal) sigaction(signal, &previous[i], nullptr);
    return;
  }
  const uintptr_t address = (uintptr_t)info->si_addr;
  const bool overflow = signal != SIGFPE && in_guard(address);
  Finding* f = add_finding(overflow ? SIM_FAULT_STACK_OVERFLOW : SIM_FAULT_CRASH, 0, kNone, kNone, 0, 0, false);
  if (f && overflow) snprintf(f->text, sizeof f->text, "its own variables do not fit in %u bytes", S.launch->stack_bytes);
  else if (f) snprintf(f->text, sizeof f->text, "%s at address %p", signal == SIGFPE ? "arithmetic fault" : "access to unmapped memory", info->si_addr);
  siglongjmp(landing, 1);
}
}  // namespace

void crash_guard_begin() {
  launching = pthread_self();
  stack_t mine = {};
  mine.ss_sp = handler_stack;
  mine.ss_size = sizeof handler_stack;
  sigaltstack(&mine, &previous_stack);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &action, &previous[i]);
}

void crash_guard_end() {
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
}

sigjmp_buf* crash_landing() { return &landing; }
