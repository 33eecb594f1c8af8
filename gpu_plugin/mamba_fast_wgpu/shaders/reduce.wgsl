// Sums in a fixed order: each workgroup leaves a partial result, and a second dispatch adds those up.
//
// The norm keeps three sums of squares, of small, middling and large elements, each scaled so that no square
// leaves the range of f32 (Blue 1978), and counts elements that are not finite.

struct Params {
    rows: u32,
    width: u32,
    groups: u32,        // workgroups of the first stage, all tensors together where there are several
    x_offset: u32,
    x_stride: u32,
    z_offset: u32,
    each: u32,          // elements that a thread adds up
    first: u32,         // where this tensor's partial results begin
    cols: u32,
    z_stride: u32,
    alpha: f32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> z: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;

const WG: u32 = 256u;
const UP: f32 = 75557863725914323419136.0;  // 2^76
const DOWN: f32 = 1.3234889800848443e-23;  // 2^-76
const LARGE: f32 = 281474976710656.0;      // 2^48
const SMALL: f32 = 1.3877787807814457e-17;  // 2^-56

var<workgroup> sums: array<vec4<f32>, 256>;

fn tree(thread: u32, mine: vec4<f32>) -> vec4<f32> {
    sums[thread] = mine;
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half = half / 2u) {
        if (thread < half) { sums[thread] = sums[thread] + sums[thread + half]; }
        workgroupBarrier();
    }
    return sums[0];
}

fn element(i: u32) -> f32 {
    let row = i / p.width;
    return x[p.x_offset + row * p.x_stride + (i - row * p.width)];
}

@compute @workgroup_size(256)
fn sum(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = group_index(group, groups);
    let start = at * WG * p.each + thread;
    var total = 0.0;
    if (at < p.groups) {
        for (var k = 0u; k < p.each; k++) {
            let i = start + k * WG;
            if (i < p.rows * p.width) { total += element(i); }
        }
    }
    let all = tree(thread, vec4<f32>(total, 0.0, 0.0, 0.0));
    if (thread == 0u && at < p.groups) { z[p.z_offset + p.first + at] = all.x; }
}

fn squares(value: f32, kept: vec4<f32>) -> vec4<f32> {
    if (!is_finite(value)) { return kept + vec4<f32>(0.0, 0.0, 0.0, 1.0); }
    let size = abs(value);
    if (size >= LARGE) { let v = value * DOWN; return kept + vec4<f32>(0.0, 0.0, v * v, 0.0); }
    if (size < SMALL) { let v = value * UP; return kept + vec4<f32>(v * v, 0.0, 0.0, 0.0); }
    return kept + vec4<f32>(0.0, value * value, 0.0, 0.0);
}

@compute @workgroup_size(256)
fn norm_partial(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = group_index(group, groups);
    let start = at * WG * p.each + thread;
    var total = vec4<f32>();
    if (at < p.groups) {
        for (var k = 0u; k < p.each; k++) {
            let i = start + k * WG;
            if (i < p.rows * p.width) { total = squares(element(i), total); }
        }
    }
    let all = tree(thread, total);
    if (thread == 0u && at < p.groups) {
        let to = p.z_offset + 4u * (p.first + at);
        z[to] = all.x;
        z[to + 1u] = all.y;
        z[to + 2u] = all.z;
        z[to + 3u] = all.w;
    }
}

@compute @workgroup_size(256)
fn norm_final(@builtin(local_invocation_index) thread: u32) {
    var total = vec4<f32>();
    for (var i = thread; i < p.groups; i += WG) {
        let at = p.x_offset + 4u * i;
        total += vec4<f32>(x[at], x[at + 1u], x[at + 2u], x[at + 3u]);
    }
    let all = tree(thread, total);
    if (thread != 0u) { return; }
    var result = 0.0;
    if (all.w > 0.0) {
        result = quiet_nan();
    } else if (all.z > 0.0) {
        result = sqrt(all.z + (all.y * DOWN) * DOWN) * UP;
    } else if (all.y > 0.0) {
        result = sqrt(all.y + (all.x * DOWN) * DOWN);
    } else {
        result = sqrt(all.x) * DOWN;
    }
    z[p.z_offset] = result;
}

// z[c] += alpha * the sum of column c of x (rows, cols), and z = ... where `each` is 0
@compute @workgroup_size(256)
fn columns(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group_index(group, groups) * WG + thread;
    if (i >= p.cols) { return; }
    var total = 0.0;
    for (var r = 0u; r < p.rows; r++) { total += x[p.x_offset + r * p.x_stride + i]; }
    // z is itself (cols / width, width)
    let row = i / p.width;
    let to = p.z_offset + row * p.z_stride + (i - row * p.width);
    total *= p.alpha;
    if (p.each != 0u) { total += z[to]; }
    z[to] = total;
}
