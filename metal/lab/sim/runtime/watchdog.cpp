// A launch in which no thread has come to its end for too long has an endless loop, or a thread that waits for another's store:
// nothing makes threads take turns but barriers and simdgroup operations. The hooks end it at the next access; a loop that
// calls none is left by a jump. Time is the launching thread's own processor time, so a busy machine changes nothing.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>
#include <ucontext.h>

#include "state.h"

namespace {
constexpr int kTick = SIGVTALRM;
constexpr long kTickNanoseconds = 50'000'000;
pthread_t ticked, ticking;
pthread_mutex_t tick_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t tick_wakes = PTHREAD_COND_INITIALIZER;
bool launch_over, ticker_runs;
struct sigaction previous_tick;
uint64_t threads_ended;  // at the last tick that saw progress
double progress_at;

double processor_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

uintptr_t interrupted_at(void* context) {
  const auto& machine = ((ucontext_t*)context)->uc_mcontext;
#if defined(__APPLE__) && defined(__aarch64__)
  return (uintptr_t)machine->__ss.__pc;
#elif defined(__APPLE__)
  return (uintptr_t)machine->__ss.__rip;
#elif defined(__aarch64__)
  return (uintptr_t)machine.pc;
#elif defined(__x86_64__)
  return (uintptr_t)machine.gregs[REG_RIP];
#else
  return 0;
#endif
}

void report_endless(uintptr_t pc) {
  if (pc - library_begin() >= library_bytes()) pc = 0;
  Finding* f = add_finding(SIM_FAULT_ENDLESS, pc, kNone, kNone, 0, 0, false);
  if (f) snprintf(f->text, sizeof f->text, "%.3g", S.launch->patience);
}

void on_tick(int, siginfo_t*, void* context) {
  const double now = processor_seconds();
  if (S.threads_ended != threads_ended) {
    threads_ended = S.threads_ended;
    progress_at = now;
  } else if (now - progress_at < S.launch->patience) {
    return;
  } else if (!S.overdue) {
    S.overdue = true;
  } else if (S.current) {  // a tick ago the hooks were asked to stop, and none was called
    report_endless(interrupted_at(context));
    siglongjmp(*crash_landing(), 1);
  }
}

void* tick(void*) {
  pthread_mutex_lock(&tick_lock);
  while (!launch_over) {
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += kTickNanoseconds;
    if (until.tv_nsec >= 1'000'000'000) until.tv_sec++, until.tv_nsec -= 1'000'000'000;
    pthread_cond_timedwait(&tick_wakes, &tick_lock, &until);
    if (!launch_over) pthread_kill(ticked, kTick);
  }
  pthread_mutex_unlock(&tick_lock);
  return nullptr;
}
}  // namespace

void watchdog_begin() {
  ticked = pthread_self();
  launch_over = S.overdue = false;
  threads_ended = S.threads_ended = 0;
  progress_at = processor_seconds();
  struct sigaction action = {};
  action.sa_sigaction = on_tick;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(kTick, &action, &previous_tick);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 65536);
  ticker_runs = pthread_create(&ticking, &attributes, tick, nullptr) == 0;
  pthread_attr_destroy(&attributes);
}

void watchdog_end() {
  pthread_mutex_lock(&tick_lock);
  launch_over = true;
  pthread_cond_signal(&tick_wakes);
  pthread_mutex_unlock(&tick_lock);
  if (ticker_runs) pthread_join(ticking, nullptr);
  sigaction(kTick, &previous_tick, nullptr);
}

[[noreturn]] void give_up_waiting(uintptr_t pc) {
  report_endless(pc);
  abandon_launch();
}
