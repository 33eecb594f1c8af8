// Softmax cross-entropy, a workgroup for each row of logits.
//
//     loss = log(sum(exp(x - max))) + max - x[target];  logits become scale * (softmax - one_hot(target))
//
// One pass finds maximum and sum together (each thread rescales its sum when its maximum grows), a second one
// writes. A row with a NaN or +inf in it has the loss NaN.

struct Params {
    rows: u32,
    width: u32,
    logits_offset: u32,
    logits_stride: u32,
    targets_offset: u32,
    ignore: i32,
    losses_offset: u32,
    scale: f32,
}

@group(0) @binding(0) var<storage, read> targets: array<i32>;
@group(0) @binding(1) var<storage, read_write> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> losses: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;

override WG: u32 = 256u;
override GRAD: bool = true;

const LOWEST: f32 = -3.4028234e38;

var<workgroup> peaks: array<f32, WG>;
var<workgroup> sums: array<f32, WG>;
var<workgroup> marks: array<u32, WG>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_index(group, groups);
    if (row >= p.rows) { return; }
    let base = p.logits_offset + row * p.logits_stride;
    let label = targets[p.targets_offset + row];
    if (label == p.ignore) {
        if (thread == 0u) { losses[p.losses_offset + row] = 0.0; }
        if (GRAD) {
            for (var i = thread; i < p.width; i += WG) { logits[base + i] = 0.0; }
        }
        return;
    }
    var peak = LOWEST;
    var sum = 0.0;
    var mark = 0u;
    for (var i = thread; i < p.width; i += WG) {
        let value = logits[base + i];
        // NaN and +inf; -inf is a logit that counts for nothing
        if (!is_finite(value) && bits_of(value) != 0xff800000u) { mark = 1u; }
        if (value > peak) {
            sum = fma(sum, exp_neg(peak - value), 1.0);
            peak = value;
        } else {
            sum += exp_neg(value - peak);
        }
    }
    peaks[thread] = peak;
    sums[thread] = sum;
    marks[thread] = mark;
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half = half / 2u) {
        if (thread < half) {
            let a = peaks[thread];
            let b = peaks[thread + half];
            let top = max(a, b);
            sums[thread] = sums[thread] * exp_neg(a - top) + sums[thread + half] * exp_neg(b - top);
            peaks[thread] = top;
            marks[thread] |= marks[thread + half];
        }
        workgroupBarrier();
    }
    let top = peaks[0];
    let all = sums[0];
    let bad = marks[0] != 0u;
    if (thread == 0u) {
        // log(1 + rest) where the rest is small
        let log_sum = select(log(all), log1p_unit(clamp(all - 1.0, 0.0, 1.0)), all <= 2.0);
        let loss = log_sum + (top - logits[base + u32(label)]);
        losses[p.losses_offset + row] = select(loss, quiet_nan(), bad);
    }
    if (GRAD) {
        workgroupBarrier();
        storageBarrier();
        let factor = p.scale / all;
        for (var i = thread; i < p.width; i += WG) {
            var value = exp_neg(logits[base + i] - top) * factor;
            if (i == u32(label)) { value -= p.scale; }
            logits[base + i] = select(value, quiet_nan(), bad);
        }
    }
}
