/* Which x86-64 level this processor and operating system run: 1 (baseline), 3 (AVX2, FMA, BMI, F16C) or
 * 4 (AVX-512 F, BW, CD, DQ, VL), as the x86-64 psABI defines them; 0 on any other architecture. */
#ifndef MAMBA_FAST_CPU_H
#define MAMBA_FAST_CPU_H

#if defined(__x86_64__) || defined(_M_X64)

#if defined(_MSC_VER)
#  include <intrin.h>
static void mf_cpuid(unsigned leaf, unsigned out[4]) { __cpuidex((int *)out, (int)leaf, 0); }
static unsigned long long mf_xgetbv(void) { return _xgetbv(0); }
#else
#  include <cpuid.h>
static void mf_cpuid(unsigned leaf, unsigned out[4]) {
    __cpuid_count(leaf, 0, out[0], out[1], out[2], out[3]);
}
static unsigned long long mf_xgetbv(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((unsigned long long)high << 32) | low;
}
#endif

#define MF_BIT(word, bit) (((word) >> (bit)) & 1u)

static int mf_x86_level(void) {
    unsigned r[4], ecx1, ebx7, ecx_extended, highest;
    unsigned long long saved;
    mf_cpuid(0, r);
    highest = r[0];
    if (highest < 7) return 1;
    mf_cpuid(1, r);
    ecx1 = r[2];
    mf_cpuid(7, r);
    ebx7 = r[1];
    mf_cpuid(0x80000000u, r);
    if (r[0] < 0x80000001u) return 1;
    mf_cpuid(0x80000001u, r);
    ecx_extended = r[2];
    /* FMA 12, MOVBE 22, OSXSAVE 27, AVX 28, F16C 29; BMI1 3, AVX2 5, BMI2 8; LZCNT 5 */
    if (!(MF_BIT(ecx1, 12) && MF_BIT(ecx1, 22) && MF_BIT(ecx1, 27) && MF_BIT(ecx1, 28) && MF_BIT(ecx1, 29)
          && MF_BIT(ebx7, 3) && MF_BIT(ebx7, 5) && MF_BIT(ebx7, 8) && MF_BIT(ecx_extended, 5)))
        return 1;
    /* The system must save the registers too: SSE and AVX (0x6), and for AVX-512 its three states (0xe6). */
    saved = mf_xgetbv();
    if ((saved & 0x6) != 0x6) return 1;
    /* AVX512F 16, DQ 17, CD 28, BW 30, VL 31 */
    if (MF_BIT(ebx7, 16) && MF_BIT(ebx7, 17) && MF_BIT(ebx7, 28) && MF_BIT(ebx7, 30) && MF_BIT(ebx7, 31)
        && (saved & 0xe6) == 0xe6)
        return 4;
    return 3;
}

#else
static int mf_x86_level(void) { return 0; }
#endif

#endif
