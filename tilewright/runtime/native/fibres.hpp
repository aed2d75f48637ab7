// Switching between fibres: save the registers that a call must keep, change the stack, go on over there. A fresh stack
// is made to look as if its fibre had been switched away just before its first instruction.
#pragma once
#include <string.h>

#if defined(__linux__) && defined(__aarch64__)
asm(R"(
.text
.p2align 2
.local tw_switch
.type tw_switch, %function
tw_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
extern "C" void tw_switch(void** save, void* load);
static void* fresh_stack(unsigned char* top, void (*start)()) {
  void** frame = reinterpret_cast<void**>(top - 160);
  memset(frame, 0, 160);
  frame[11] = reinterpret_cast<void*>(start);  // x30
  return frame;
}
#elif defined(__linux__) && defined(__x86_64__)
asm(R"(
.text
.p2align 4
.local tw_switch
.type tw_switch, @function
tw_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void tw_switch(void** save, void* load);
static void* fresh_stack(unsigned char* top, void (*start)()) {
  // Six registers, the address `ret` takes, and a zero return address: at its start rsp is 8 below a multiple of 16.
  void** frame = reinterpret_cast<void**>(top - 64);
  memset(frame, 0, 64);
  frame[6] = reinterpret_cast<void*>(start);
  return frame;
}
#else
#include <ucontext.h>
struct Portable { ucontext_t context; };
static void tw_switch(void** save, void* load) {
  Portable from;
  *save = &from;
  swapcontext(&from.context, &static_cast<Portable*>(load)->context);
}
static void* fresh_stack(unsigned char* top, void (*start)()) {
  Portable* made = reinterpret_cast<Portable*>(top - ((sizeof(Portable) + 63) / 64 * 64));
  getcontext(&made->context);
  made->context.uc_stack.ss_sp = top - (192 << 10);
  made->context.uc_stack.ss_size = (192 << 10) - ((sizeof(Portable) + 63) / 64 * 64) - 64;
  made->context.uc_link = nullptr;
  makecontext(&made->context, start, 0);
  return made;
}
#endif
