// What the scan's kernels for 13 to 16 states share; `//#include`d by them. Four lanes next to each other in
// a subgroup walk one channel, four states each.

const WIDTH: u32 = 32;          // channels of a workgroup of 128

// 2^t - 1 without cancellation near 0. Away from 0 WGSL's exp2 will do: what the states need of exp(z) is
// exp(z) - 1, whose error there is the last place of a number near 1.
fn exp2_minus_one(t: vec4<f32>) -> vec4<f32> {
    var q = vec4<f32>(1.538456418e-04);
    q = fma(q, t, vec4<f32>(1.338742091e-03));
    q = fma(q, t, vec4<f32>(9.618305601e-03));
    q = fma(q, t, vec4<f32>(5.550367385e-02));
    q = fma(q, t, vec4<f32>(2.402264923e-01));
    q = fma(q, t, vec4<f32>(6.931471825e-01));
    return select(exp2(t) - 1.0, q * t, abs(t) < vec4<f32>(0.5));
}

// A state one step on, and what the way back needs of exp(Delta A): itself below 2^-0.5, else less 1, so that
// neither form cancels (`is_decay` tells them apart). h + em1 (h + x) keeps the distance of a decay from 1; a decay
// near 0 costs the last place of the state before, which the input outweighs. The gradient of A does not bear that,
// since it multiplies by Delta A.
struct Step {
    h: vec4<f32>,
    exp: vec4<f32>,
}

fn is_decay(t: vec4<f32>) -> vec4<bool> {
    return t < vec4<f32>(-0.5);
}

fn advance(h: vec4<f32>, step: f32, u: f32, vb: vec4<f32>, a2: vec4<f32>, ia: vec4<f32>) -> Step {
    let t = step * a2;
    let em1 = exp2_minus_one(t);
    let coded = select(em1, exp2(t), is_decay(t));
    if ZOH {
        return Step(fma(em1, fma(u * vb, ia, h), h), coded);
    }
    return Step(fma(vec4<f32>(u * step), vb, fma(em1, h, h)), coded);
}

// A value of the lane whose number differs in the bits of `mask`.
//#if EMULATED
// Through workgroup memory: for tests of wide subgroups on narrow ones. All lanes get here together.
var<workgroup> exchange: array<vec4<f32>, 128>;
var<private> exchange_lane: u32;

fn swap4(v: vec4<f32>, mask: u32) -> vec4<f32> {
    workgroupBarrier();
    exchange[exchange_lane] = v;
    workgroupBarrier();
    return exchange[exchange_lane ^ mask];
}
fn swap2(v: vec2<f32>, mask: u32) -> vec2<f32> { return swap4(v.xyxy, mask).xy; }
fn swap1(v: f32, mask: u32) -> f32 { return swap4(vec4<f32>(v), mask).x; }
//#else
fn swap4(v: vec4<f32>, mask: u32) -> vec4<f32> { return subgroupShuffleXor(v, mask); }
fn swap2(v: vec2<f32>, mask: u32) -> vec2<f32> { return subgroupShuffleXor(v, mask); }
fn swap1(v: f32, mask: u32) -> f32 { return subgroupShuffleXor(v, mask); }
//#endif

// Sums over the four lanes of a channel: lane q of them gets that of v[q].
fn sum_quads(v: vec4<f32>, q: u32) -> f32 {
    let high = (q & 2u) != 0u;
    let pair = select(v.xy, v.zw, high) + swap2(select(v.zw, v.xy, high), 2u);
    let odd = (q & 1u) != 0u;
    return select(pair.x, pair.y, odd) + swap1(select(pair.y, pair.x, odd), 1u);
}
