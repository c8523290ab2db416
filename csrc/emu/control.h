// What tests ask of the emulator; plain C, so that ctypes can.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
void* levit_emu_allocate(size_t bytes);
void levit_emu_upload(void* to, const void* from, size_t bytes);
void levit_emu_release_all();
void levit_emu_schedule(uint64_t seed, int random);
// Every place that synchronises, in the order they were first met: "__syncthreads name.cuh:12"; null beyond the last
const char* levit_emu_switch(int number);
void levit_emu_switch_off(int number);  // -1: none
const char* levit_emu_failure();        // of the last launch that failed
uint64_t levit_emu_products();          // mma instructions since the start, of m16n8k16: 2048 multiply-adds each
}
