// One step of the scan for decoding: one invocation a channel. The state is updated in place.

//#include scan_math

const SMALLEST_A: f32 = 1e-12;

override ZOH: bool = true;
override SOFTPLUS: bool = true;
override HAS_D: bool = false;
override HAS_Z: bool = false;
override HAS_DELTA_BIAS: bool = false;

struct Params {
    batch: u32,
    width: u32,
    states: u32,
    unused: u32,
    u: vec2<u32>,        // views: offset and row stride, in elements
    delta: vec2<u32>,
    a: vec2<u32>,
    b: vec2<u32>,
    c: vec2<u32>,
    d: vec2<u32>,
    z: vec2<u32>,
    delta_bias: vec2<u32>,
    state: vec2<u32>,
    y: vec2<u32>,
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> u_in: array<f32>;
@group(0) @binding(1) var<storage, read> delta_in: array<f32>;
@group(0) @binding(2) var<storage, read> a_in: array<f32>;
@group(0) @binding(3) var<storage, read> b_in: array<f32>;
@group(0) @binding(4) var<storage, read> c_in: array<f32>;
@group(0) @binding(5) var<storage, read> d_in: array<f32>;
@group(0) @binding(6) var<storage, read> z_in: array<f32>;
@group(0) @binding(7) var<storage, read> bias_in: array<f32>;
@group(0) @binding(8) var<storage, read_write> state: array<f32>;
@group(0) @binding(9) var<storage, read_write> y_out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let batch = i / params.width;
    let e = i % params.width;
    if batch >= params.batch {
        return;
    }
    var raw = delta_in[params.delta.x + batch * params.delta.y + e];
    if HAS_DELTA_BIAS {
        raw = raw + bias_in[params.delta_bias.x + e];
    }
    var step = raw;
    if SOFTPLUS {
        step = softplus(raw);
    }
    let x = u_in[params.u.x + batch * params.u.y + e];
    // The exponential below loses a NaN in Delta: the input takes it along.
    let input = select(select(step * x, x, ZOH), raw, is_nan(raw));
    var out = 0.0;
    if HAS_D {
        out = d_in[params.d.x + e] * x;
    }
    let a_at = params.a.x + e * params.a.y;
    let b_at = params.b.x + batch * params.b.y;
    let c_at = params.c.x + batch * params.c.y;
    let h_at = params.state.x + i * params.state.y;
    for (var n = 0u; n < params.states; n = n + 4u) {
        let left = min(params.states - n, 4u);
        var a = vec4<f32>(-1.0);
        var b = vec4<f32>(0.0);
        var c = vec4<f32>(0.0);
        var h = vec4<f32>(0.0);
        for (var k = 0u; k < left; k = k + 1u) {
            let v = a_in[a_at + n + k];
            a[k] = select(v, select(-SMALLEST_A, SMALLEST_A, v > 0.0), abs(v) < SMALLEST_A);
            b[k] = b_in[b_at + n + k];
            c[k] = c_in[c_at + n + k];
            h[k] = state[h_at + n + k];
        }
        let e2 = exp2_parts(step * (a * LOG2E));
        if ZOH {
            h = decayed(e2, h) + minus_one(e2) * (input * b / a);
        } else {
            h = decayed(e2, h) + input * b;
        }
        out = out + dot(h, c);
        for (var k = 0u; k < left; k = k + 1u) {
            state[h_at + n + k] = h[k];
        }
    }
    if HAS_Z {
        out = out * silu(z_in[params.z.x + batch * params.z.y + e]);
    }
    y_out[params.y.x + batch * params.y.y + e] = out;
}
