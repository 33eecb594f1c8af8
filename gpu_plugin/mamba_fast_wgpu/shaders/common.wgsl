// Helpers that come before every kernel.
//
// WGSL has no expm1 and no log1p, and a compiler of shaders may assume that there are no NaNs: x != x need not
// be true for one. So finiteness is a matter of bits, and what has to keep its relative accuracy is computed by
// polynomials, those of the CPU kernels (tools/fit_vecmath.py).

const LOG2E: f32 = 1.44269504088896340736;

// ---- classes of numbers, by bits ----

fn bits_of(x: f32) -> u32 { return bitcast<u32>(x); }
fn is_finite(x: f32) -> bool { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
fn is_nan(x: f32) -> bool { return (bits_of(x) & 0x7fffffffu) > 0x7f800000u; }
fn infinity() -> f32 { return bitcast<f32>(opaque(0x7f800000u)); }
fn quiet_nan() -> f32 { return bitcast<f32>(opaque(0x7fc00000u)); }
// A value that the compiler must not fold into a constant: WGSL rejects constants that are not finite.
fn opaque(bits: u32) -> u32 { var kept = bits; return kept; }

// ---- exponentials ----

// e^(y - k ln 2) - 1 for |y - k ln 2| <= 0.347
fn exp_reduced_m1(y: f32, k: f32) -> f32 {
    var r = fma(k, -0.693145751953125, y); // ln 2 in two parts: k times the first is exact
    r = fma(k, -1.42860677e-6, r);
    var p = 1.390551333e-03;
    p = fma(p, r, 8.362974972e-03);
    p = fma(p, r, 4.166676477e-02);
    p = fma(p, r, 1.666657925e-01);
    p = fma(p, r, 5.000000000e-01);
    return fma(p, r * r, r);
}

// 2^k for an integer k in [-127, 127]; 0 for -127
fn power_of_two(k: f32) -> f32 { return bitcast<f32>(u32(i32(k) + 127) << 23u); }

// e^x for x <= 0: 0 below -87.7
fn exp_neg(x: f32) -> f32 {
    let y = max(x, -88.0);
    let k = round(y * LOG2E);
    return (exp_reduced_m1(y, k) + 1.0) * power_of_two(max(k, -127.0));
}

// e^x - 1 without cancellation near 0, for x <= 88
fn expm1(x: f32) -> f32 {
    let y = max(x, -88.0);
    let k = round(y * LOG2E);
    let s = power_of_two(clamp(k, -127.0, 127.0));
    return fma(s, exp_reduced_m1(y, k), s - 1.0);
}

// log(1 + w) for 0 <= w <= 1
fn log1p_unit(w: f32) -> f32 {
    var p = -3.310628003e-03;
    p = fma(p, w, 2.016826533e-02);
    p = fma(p, w, -5.759408697e-02);
    p = fma(p, w, 1.067316905e-01);
    p = fma(p, w, -1.535084993e-01);
    p = fma(p, w, 1.969374567e-01);
    p = fma(p, w, -2.495824695e-01);
    p = fma(p, w, 3.333047628e-01);
    p = fma(p, w, -4.999993145e-01);
    return fma(p * w, w, w);
}

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), which never overflows
fn softplus(x: f32) -> f32 { return max(x, 0.0) + log1p_unit(exp_neg(-abs(x))); }

// 1 / (1 + e^-x), with full relative accuracy on both sides
fn sigmoid(x: f32) -> f32 {
    let w = exp_neg(-abs(x));
    return select(1.0, w, x < 0.0) / (1.0 + w);
}

fn silu(x: f32) -> f32 { return x * sigmoid(x); }

// d silu(x) / dx
fn silu_prime(x: f32) -> f32 {
    let s = sigmoid(x);
    return s * fma(x, 1.0 - s, 1.0);
}

// phi'(z) for |z| <= 0.3475, where phi(z) = expm1(z) / z; the closed form (z e^z - expm1(z)) / z^2 cancels there
fn phi_prime_near_zero(z: f32) -> f32 {
    var p = 1.188418362e-03;
    p = fma(p, z, 6.973491516e-03);
    p = fma(p, z, 3.333400190e-02);
    p = fma(p, z, 1.249989271e-01);
    p = fma(p, z, 3.333333135e-01);
    return fma(p, z, 5.000000000e-01);
}

// ---- places ----

// The number of this workgroup where the host asked for one count of them (encoder.dispatch).
fn group_index(group: vec3<u32>, groups: vec3<u32>) -> u32 { return group.x + group.y * groups.x; }
