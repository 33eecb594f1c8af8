// The scan's exponentials, for four states at a time; `//#include`d by its kernels.

// 2^t = s (1 + p), s a power of two, t taken as within [-126, 127]. A state decays to s (p h + h): a
// decay near 1 keeps its distance from 1, one near 0 its own digits. A NaN is lost.
struct Parts {
    s: vec4<f32>,
    p: vec4<f32>,
}

fn exp2_parts(t: vec4<f32>) -> Parts {
    let y = clamp(t, vec4<f32>(-126.0), vec4<f32>(127.0));
    let k = round(y);
    let f = y - k;
    var q = vec4<f32>(1.538456418e-04);
    q = fma(q, f, vec4<f32>(1.338742091e-03));
    q = fma(q, f, vec4<f32>(9.618305601e-03));
    q = fma(q, f, vec4<f32>(5.550367385e-02));
    q = fma(q, f, vec4<f32>(2.402264923e-01));
    q = fma(q, f, vec4<f32>(6.931471825e-01));
    return Parts(bitcast<vec4<f32>>((vec4<i32>(k) + 127) << vec4<u32>(23u)), q * f);
}

// 2^t - 1 from its parts, without cancellation
fn minus_one(e: Parts) -> vec4<f32> {
    return fma(e.s, e.p, e.s - 1.0);
}

// x 2^t from the parts of 2^t
fn decayed(e: Parts, x: vec4<f32>) -> vec4<f32> {
    return e.s * fma(e.p, x, x);
}

// phi'(z) Delta^2 where phi(z) = expm1(z) / z, z = Delta A: in closed form that cancels for small |z|
fn gain_slope(e: Parts, em1: vec4<f32>, z: vec4<f32>, ia: vec4<f32>, step: f32) -> vec4<f32> {
    var p = vec4<f32>(1.188418362e-03);
    p = fma(p, z, vec4<f32>(6.973491516e-03));
    p = fma(p, z, vec4<f32>(3.333400190e-02));
    p = fma(p, z, vec4<f32>(1.249989271e-01));
    p = fma(p, z, vec4<f32>(3.333333135e-01));
    p = fma(p, z, vec4<f32>(5.000000000e-01));
    let far = fma(z, fma(e.s, e.p, e.s), -em1) * (ia * ia);
    return select(far, p * (step * step), abs(z) < vec4<f32>(0.34657359));
}
