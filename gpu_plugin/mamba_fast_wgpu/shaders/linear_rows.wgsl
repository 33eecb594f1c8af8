// Matrix products with few rows, as in decoding: z (m, n) = alpha * x yT + bias, x (m, k), y (n, k).
//
// Bound by the bytes of y: 16 threads read a row of y side by side and add up what each has found in workgroup
// memory. A workgroup makes 16 results of one row.

struct Params {
    m: u32,
    n: u32,
    k: u32,
    groups: u32,
    x_offset: u32,
    x_stride: u32,
    y_offset: u32,
    y_stride: u32,
    z_offset: u32,
    z_stride: u32,
    bias_offset: u32,
    alpha: f32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> y: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> z: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;

override BIAS: bool = false;
override ACCUMULATE: bool = false;

const LANES: u32 = 16u;
const RESULTS: u32 = 16u;

var<workgroup> parts: array<f32, 256>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = group_index(group, groups);
    let blocks = (p.n + RESULTS - 1u) / RESULTS;
    let row = at / blocks;
    let col = (at - row * blocks) * RESULTS + thread / LANES;
    let lane = thread % LANES;
    let inside = row < p.m && col < p.n;
    var total = 0.0;
    if (inside) {
        let from_x = p.x_offset + row * p.x_stride;
        let from_y = p.y_offset + col * p.y_stride;
        for (var k = lane; k < p.k; k += LANES) { total = fma(x[from_x + k], y[from_y + k], total); }
    }
    parts[thread] = total;
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half = half / 2u) {
        if (lane < half) { parts[thread] = parts[thread] + parts[thread + half]; }
        workgroupBarrier();
    }
    if (inside && lane == 0u) {
        let to = p.z_offset + row * p.z_stride + col;
        var value = p.alpha * parts[thread];
        if (BIAS) { value += bias[p.bias_offset + col]; }
        if (ACCUMULATE) { value += z[to]; }
        z[to] = value;
    }
}
