// AdamW (Loshchilov and Hutter 2019, algorithm 2) with a guard, a clip and a trust region.
//
// `prepare` decides once, from the norm's bits, whether there is a step at all, and what the step's factors are;
// `step` runs for each tensor; `finish` writes the statistics. Nothing of it is read by the host.

struct Params {
    rows: u32,
    width: u32,
    groups: u32,
    first: u32,         // where this tensor's counts of clamped elements begin; for `finish`: their number
    p_offset: u32,
    p_stride: u32,
    g_offset: u32,
    g_stride: u32,
    m_offset: u32,
    m_stride: u32,
    v_offset: u32,
    v_stride: u32,
    norm_offset: u32,
    stats_offset: u32,
    step: f32,
    lr: f32,
    log_beta1: f32,
    log_beta2: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    eps: f32,
    decay: f32,         // lr * weight_decay
    bound: f32,         // of a step's size; 0: none
    max_norm: f32,      // 0: no clipping
}

// What `prepare` leaves for the others.
struct Factors { go: u32, clip: f32, rate: f32, root: f32 }

@group(0) @binding(0) var<storage, read> g: array<f32>;
@group(0) @binding(1) var<storage, read> factors: Factors;
@group(0) @binding(2) var<storage, read_write> param: array<f32>;
@group(0) @binding(3) var<storage, read_write> m: array<f32>;
@group(0) @binding(4) var<storage, read_write> v: array<f32>;
@group(0) @binding(5) var<storage, read_write> counts: array<u32>;

@group(0) @binding(0) var<storage, read> norm: array<f32>;
@group(0) @binding(1) var<storage, read_write> made: Factors;
@group(0) @binding(2) var<storage, read_write> stats: array<f32>;

@group(1) @binding(0) var<uniform> p: Params;

const WG: u32 = 256u;
override EACH: u32 = 4u;     // elements of a thread
override BOUND: bool = false;

var<workgroup> clamped: array<u32, 256>;

fn tree(thread: u32, mine: u32) -> u32 {
    clamped[thread] = mine;
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half = half / 2u) {
        if (thread < half) { clamped[thread] += clamped[thread + half]; }
        workgroupBarrier();
    }
    return clamped[0];
}

@compute @workgroup_size(1)
fn prepare() {
    let size = norm[p.norm_offset];
    made.go = select(0u, 1u, is_finite(size));
    var clip = 1.0;
    if (p.max_norm > 0.0) { clip = min(1.0, p.max_norm / (size + 1e-6)); }
    made.clip = clip;
    // 1 - beta^t without the cancellation of t = 1
    let t = max(p.step - stats[p.stats_offset], 1.0);
    made.rate = p.lr / -expm1(t * p.log_beta1);
    made.root = 1.0 / sqrt(-expm1(t * p.log_beta2));
}

@compute @workgroup_size(256)
fn step(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = group_index(group, groups);
    if (at >= p.groups) { return; }
    let go = factors.go != 0u;
    var count = 0u;
    for (var k = 0u; k < EACH; k++) {
        let i = (at * EACH + k) * WG + thread;
        let row = i / p.width;
        let col = i - row * p.width;
        if (go && row < p.rows) {
            let to_m = p.m_offset + row * p.m_stride + col;
            let to_v = p.v_offset + row * p.v_stride + col;
            let to_p = p.p_offset + row * p.p_stride + col;
            let grad = factors.clip * g[p.g_offset + row * p.g_stride + col];
            let first = p.beta1 * m[to_m] + p.rest1 * grad;
            let second = p.beta2 * v[to_v] + p.rest2 * (grad * grad);
            var change = 0.0;
            // One square out of range must not freeze an element for ever.
            if (is_finite(second)) {
                m[to_m] = first;
                v[to_v] = second;
                change = factors.rate * first / (sqrt(second) * factors.root + p.eps);
                if (!is_finite(change)) { change = 0.0; }
            }
            if (BOUND && abs(change) > p.bound) {
                count += 1u;
                change = clamp(change, -p.bound, p.bound);
            }
            let old = param[to_p];
            param[to_p] = old - (p.decay * old + change);
        }
    }
    if (BOUND) {
        let all = tree(thread, count);
        if (thread == 0u) { counts[p.first + at] = all; }
    }
}

@group(0) @binding(0) var<storage, read> counted: array<u32>;
@group(0) @binding(1) var<storage, read> norm_bits: array<u32>;
@group(0) @binding(2) var<storage, read> kept: Factors;
@group(0) @binding(3) var<storage, read_write> stats_out: array<u32>;

@compute @workgroup_size(256)
fn finish(@builtin(local_invocation_index) thread: u32) {
    var count = 0u;
    for (var i = thread; i < p.first; i += WG) { count += counted[i]; }
    let all = tree(thread, count);
    if (thread != 0u) { return; }
    let to = p.stats_offset;
    // The norm's bits pass as they are, which a NaN need not survive as a float.
    stats_out[to + 1u] = norm_bits[p.norm_offset];
    if (kept.go == 0u) {
        stats_out[to] = bits_of(bitcast<f32>(stats_out[to]) + 1.0);
        stats_out[to + 2u] = 0u;
        stats_out[to + 3u] = 0u;
    } else {
        stats_out[to + 2u] = bits_of(kept.clip);
        stats_out[to + 3u] = bits_of(f32(all));
    }
}
