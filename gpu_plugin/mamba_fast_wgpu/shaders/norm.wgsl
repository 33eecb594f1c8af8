// RMSNorm: y = x * inv * w with inv = 1 / sqrt(mean(x^2) + eps), a workgroup for each row.
//
// Backward, with g = dy * w:  dx = inv * (g - x * inv^2 * mean(g * x));  dw = the sum over rows of dy * x * inv.
// That sum is made in two stages: `weight` leaves one row for each chunk of rows, `reduce:columns` adds those.

struct Params {
    rows: u32,
    width: u32,
    x_offset: u32,
    x_stride: u32,
    y_offset: u32,      // y, or dy going back
    y_stride: u32,
    z_offset: u32,      // dx, or partial sums of dw
    z_stride: u32,
    w_offset: u32,
    chunk: u32,         // rows of a partial sum
    eps: f32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> w: array<f32>;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read> inv_in: array<f32>;
@group(0) @binding(4) var<storage, read_write> z: array<f32>;
@group(0) @binding(5) var<storage, read_write> inv_out: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;

override WG: u32 = 256u;
override WEIGHT: bool = true;
override ACCUMULATE: bool = false;
override SAVE: bool = true;

var<workgroup> sums: array<f32, WG>;

fn tree(thread: u32, mine: f32) -> f32 {
    sums[thread] = mine;
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half = half / 2u) {
        if (thread < half) { sums[thread] = sums[thread] + sums[thread + half]; }
        workgroupBarrier();
    }
    return sums[0];
}

fn weight_at(i: u32) -> f32 {
    if (WEIGHT) { return w[p.w_offset + i]; }
    return 1.0;
}

@compute @workgroup_size(WG)
fn forward(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_index(group, groups);
    if (row >= p.rows) { return; }
    let base = p.x_offset + row * p.x_stride;
    var total = 0.0;
    for (var i = thread; i < p.width; i += WG) {
        let value = x[base + i];
        total = fma(value, value, total);
    }
    let inv = 1.0 / sqrt(tree(thread, total) / f32(p.width) + p.eps);
    if (SAVE && thread == 0u) { inv_out[row] = inv; }
    let to = p.y_offset + row * p.y_stride;
    for (var i = thread; i < p.width; i += WG) { z[to + i] = x[base + i] * inv * weight_at(i); }
}

@compute @workgroup_size(WG)
fn backward(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_index(group, groups);
    if (row >= p.rows) { return; }
    let inv = inv_in[row];
    let from_x = p.x_offset + row * p.x_stride;
    let from_y = p.y_offset + row * p.y_stride;
    var total = 0.0;
    // x * inv is near 1 where x itself may be large or small.
    for (var i = thread; i < p.width; i += WG) {
        total = fma(dy[from_y + i] * weight_at(i), x[from_x + i] * inv, total);
    }
    let mean = tree(thread, total) / f32(p.width);
    let to = p.z_offset + row * p.z_stride;
    for (var i = thread; i < p.width; i += WG) {
        var value = inv * (dy[from_y + i] * weight_at(i) - x[from_x + i] * inv * mean);
        if (ACCUMULATE) { value += z[to + i]; }
        z[to + i] = value;
    }
}

// Workgroup (c, r): the sum over chunk r of rows, of WG columns from c * WG on.
@compute @workgroup_size(WG)
fn weight(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let col = group.x * WG + thread;
    if (col >= p.width) { return; }
    var total = 0.0;
    let stop = min((group.y + 1u) * p.chunk, p.rows);
    for (var row = group.y * p.chunk; row < stop; row++) {
        total = fma(
            dy[p.y_offset + row * p.y_stride + col], x[p.x_offset + row * p.x_stride + col] * inv_in[row], total,
        );
    }
    z[p.z_offset + group.y * p.z_stride + col] = total;
}

// The same of dy alone: the gradient of a bias.
@compute @workgroup_size(WG)
fn bias(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let col = group.x * WG + thread;
    if (col >= p.width) { return; }
    var total = 0.0;
    let stop = min((group.y + 1u) * p.chunk, p.rows);
    for (var row = group.y * p.chunk; row < stop; row++) {
        total += dy[p.y_offset + row * p.y_stride + col];
    }
    z[p.z_offset + group.y * p.z_stride + col] = total;
}
