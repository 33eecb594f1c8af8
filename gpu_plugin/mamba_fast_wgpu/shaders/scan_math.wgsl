// Elementary functions with a known relative error, which WGSL's own do not have: exp2 may be off by
// 3 + 2 |x| units in the last place, there is no expm1 and no log1p. The polynomials are those of
// mamba_fast/_vecmath.h (tools/fit_vecmath.py), where their errors are stated.

const LOG2E: f32 = 1.4426950408889634;

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

// e^x for x <= 0; 0 below -87.
fn exp_neg(x: f32) -> f32 {
    let y = max(x, -88.0);
    let k = round(y * LOG2E);
    let r = (y - k * 0.693145751953125) - k * 1.42860677e-6;
    var p = 1.390551333e-03;
    p = p * r + 8.362974972e-03;
    p = p * r + 4.166676477e-02;
    p = p * r + 1.666657925e-01;
    p = p * r + 5.000000000e-01;
    p = p * (r * r) + r;
    return (p + 1.0) * bitcast<f32>(u32(i32(k) + 127) << 23u);
}

// log(1 + w) for 0 <= w <= 1
fn log1p_unit(w: f32) -> f32 {
    var p = -3.310628003e-03;
    p = p * w + 2.016826533e-02;
    p = p * w - 5.759408697e-02;
    p = p * w + 1.067316905e-01;
    p = p * w - 1.535084993e-01;
    p = p * w + 1.969374567e-01;
    p = p * w - 2.495824695e-01;
    p = p * w + 3.333047628e-01;
    p = p * w - 4.999993145e-01;
    return (p * w) * w + w;
}

// log(1 + e^x), which never overflows; NaN for NaN, tested on its bits
fn softplus(x: f32) -> f32 {
    return select(max(x, 0.0) + log1p_unit(exp_neg(-abs(x))), x, is_nan(x));
}

fn sigmoid(x: f32) -> f32 {
    let w = exp_neg(-abs(x));
    return select(select(1.0, w, x < 0.0) / (1.0 + w), x, is_nan(x));
}

// 2^t = s (1 + p), s a power of two, t taken as within [-126, 127]. A state decays to s (p h + h): a
// decay near 1 keeps its distance from 1, one near 0 its own digits.
struct Parts {
    s: vec4<f32>,
    p: vec4<f32>,
}

fn exp2_parts(t: vec4<f32>) -> Parts {
    let y = clamp(t, vec4<f32>(-126.0), vec4<f32>(127.0));
    let k = round(y);
    let f = y - k;
    var q = vec4<f32>(1.538456418e-04);
    q = q * f + 1.338742091e-03;
    q = q * f + 9.618305601e-03;
    q = q * f + 5.550367385e-02;
    q = q * f + 2.402264923e-01;
    q = q * f + 6.931471825e-01;
    return Parts(bitcast<vec4<f32>>((vec4<i32>(k) + 127) << vec4<u32>(23u)), q * f);
}

// 2^t - 1 without cancellation
fn exp2m1(t: vec4<f32>) -> vec4<f32> {
    let e = exp2_parts(t);
    return e.s * e.p + (e.s - 1.0);
}

// softplus'(x) from softplus(x)
fn softplus_slope(y: f32) -> f32 {
    return -exp2m1(vec4<f32>(-LOG2E * y)).x;
}

// phi'(z) for |z| <= 0.3475, phi(z) = expm1(z) / z: there the closed form cancels
fn phi_prime_near_zero(z: vec4<f32>) -> vec4<f32> {
    var p = vec4<f32>(1.188418362e-03);
    p = p * z + 6.973491516e-03;
    p = p * z + 3.333400190e-02;
    p = p * z + 1.249989271e-01;
    p = p * z + 3.333333135e-01;
    p = p * z + 5.000000000e-01;
    return p;
}
