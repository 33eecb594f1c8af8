// A = -exp(clamp(a_log, -10, 5)) and its gradient.

struct Params {
    rows: u32,
    width: u32,
    groups: u32,
    a_log_offset: u32,
    a_log_stride: u32,
    a_offset: u32,
    a_stride: u32,
    d_a_offset: u32,
    d_a_stride: u32,
    d_a_log_offset: u32,
    d_a_log_stride: u32,
}

@group(0) @binding(0) var<storage, read> a_log: array<f32>;
@group(0) @binding(1) var<storage, read> d_a: array<f32>;
@group(0) @binding(2) var<storage, read_write> a: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_a_log: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;

const WG: u32 = 256u;

// e^x for -10 <= x <= 5
fn exp_clamped(x: f32) -> f32 {
    let k = round(x * LOG2E);
    return (exp_reduced_m1(x, k) + 1.0) * power_of_two(k);
}

@compute @workgroup_size(256)
fn forward(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group_index(group, groups) * WG + thread;
    let row = i / p.width;
    let col = i - row * p.width;
    if (row < p.rows) {
        let x = a_log[p.a_log_offset + row * p.a_log_stride + col];
        a[p.a_offset + row * p.a_stride + col] = -exp_clamped(clamp(x, -10.0, 5.0));
    }
}

@compute @workgroup_size(256)
fn backward(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group_index(group, groups) * WG + thread;
    let row = i / p.width;
    let col = i - row * p.width;
    if (row >= p.rows) { return; }
    let x = a_log[p.a_log_offset + row * p.a_log_stride + col];
    if (x > -10.0 && x < 5.0) {
        let at = p.d_a_log_offset + row * p.d_a_log_stride + col;
        let slope = -exp_clamped(x);
        d_a_log[at] = fma(d_a[p.d_a_offset + row * p.d_a_stride + col], slope, d_a_log[at]);
    }
}
