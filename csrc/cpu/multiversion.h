// LEVIT_MULTIVERSION before a function compiles it once per vector width; the loader picks the widest that the CPU has,
// so one binary serves every x86-64 machine and nothing is built for the machine that happens to build it.
// Templates cannot be multiversioned: put the work in a LEVIT_INLINE template and call it from a plain function.
#pragma once

#if defined(__GNUC__) || defined(__clang__)
#define LEVIT_INLINE inline __attribute__((always_inline))
#else
#define LEVIT_INLINE inline
#endif

// The choice is made by an ifunc, which musl lacks, and which runs before a sanitizer has set itself up.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    ((defined(__clang__) && __clang_major__ >= 14) || (!defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 7))
#define LEVIT_MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LEVIT_MULTIVERSION
#endif
