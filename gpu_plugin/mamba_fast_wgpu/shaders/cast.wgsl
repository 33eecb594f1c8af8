// 16-bit storage types: two elements in a word, the first one in the lower half.
//
// Conversions work on bits, so that they are exact on any device: not all keep subnormals or NaNs in floating
// arithmetic. A thread owns a whole word of what is written, also where a view covers half of it.

struct Params {
    rows: u32,
    width: u32,
    groups: u32,
    x_offset: u32,
    x_stride: u32,
    z_offset: u32,
    z_stride: u32,
    first_word: u32,  // of what is written
    words: u32,
    bits: u32,
}

@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<storage, read_write> z: array<u32>;
@group(1) @binding(0) var<uniform> p: Params;

const WG: u32 = 256u;
override FROM: u32 = 0u;  // 0 f32, 1 f16, 2 bf16
override TO: u32 = 1u;

// ---- conversions of bits ----

fn f16_to_f32(h: u32) -> u32 {
    let sign = (h & 0x8000u) << 16u;
    let exponent = (h >> 10u) & 31u;
    let fraction = h & 0x3ffu;
    if (exponent == 31u) { return sign | 0x7f800000u | (fraction << 13u); }
    if (exponent != 0u) { return sign | ((exponent + 112u) << 23u) | (fraction << 13u); }
    if (fraction == 0u) { return sign; }
    let top = firstLeadingBit(fraction);  // the value is fraction * 2^-24
    return sign | ((top + 103u) << 23u) | ((fraction << (23u - top)) & 0x7fffffu);
}

// bits >> shift to nearest, ties to even, for shift in [1, 31]
fn round_shift(bits: u32, shift: u32) -> u32 {
    let kept = bits >> shift;
    let rest = bits & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    return kept + select(0u, 1u, rest > half || (rest == half && (kept & 1u) == 1u));
}

fn f32_to_f16(bits: u32) -> u32 {
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) { return sign | 0x7e00u; }
    if (size >= 0x47800000u) { return sign | 0x7c00u; }
    if (size >= 0x38800000u) { return sign | round_shift(size - 0x38000000u, 13u); }
    if (size < 0x33000000u) { return sign; }
    // A subnormal half: the significand in units of 2^-24
    return sign | round_shift((size & 0x7fffffu) | 0x800000u, 126u - (size >> 23u));
}

fn f32_to_bf16(bits: u32) -> u32 {
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return (bits >> 16u) | 0x40u; }
    return round_shift(bits, 16u);
}

fn widen(h: u32) -> u32 {
    if (FROM == 1u) { return f16_to_f32(h); }
    return h << 16u;
}

fn narrow(bits: u32) -> u32 {
    if (TO == 1u) { return f32_to_f16(bits); }
    return f32_to_bf16(bits);
}

fn half_of(i: u32) -> u32 { return (x[i >> 1u] >> ((i & 1u) * 16u)) & 0xffffu; }

// ---- kernels ----

// To f32: a thread writes one element.
@compute @workgroup_size(256)
fn to_f32(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group_index(group, groups) * WG + thread;
    let row = i / p.width;
    let col = i - row * p.width;
    if (row < p.rows) {
        z[p.z_offset + row * p.z_stride + col] = widen(half_of(p.x_offset + row * p.x_stride + col));
    }
}

// What element i of z's buffer becomes; outside the view it stays.
fn stored(i: u32, old: u32, constant: bool) -> u32 {
    if (i < p.z_offset) { return old; }
    let from_start = i - p.z_offset;
    let row = from_start / p.z_stride;
    let col = from_start - row * p.z_stride;
    if (row >= p.rows || col >= p.width) { return old; }
    if (constant) { return p.bits; }
    let at = p.x_offset + row * p.x_stride + col;
    if (FROM == TO) { return half_of(at); }
    if (FROM == 0u) { return narrow(x[at]); }
    return narrow(widen(half_of(at)));
}

// To a 16-bit type, or from one to itself.
@compute @workgroup_size(256)
fn to_half(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group_index(group, groups) * WG + thread;
    if (i >= p.words) { return; }
    let word = p.first_word + i;
    let old = z[word];
    let low = stored(2u * word, old & 0xffffu, false);
    let high = stored(2u * word + 1u, old >> 16u, false);
    z[word] = low | (high << 16u);
}

@compute @workgroup_size(256)
fn fill_half(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group_index(group, groups) * WG + thread;
    if (i >= p.words) { return; }
    let word = p.first_word + i;
    let old = z[word];
    let low = stored(2u * word, old & 0xffffu, true);
    let high = stored(2u * word + 1u, old >> 16u, true);
    z[word] = low | (high << 16u);
}
