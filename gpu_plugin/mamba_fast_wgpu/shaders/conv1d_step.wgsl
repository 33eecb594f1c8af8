// One step of the convolution for decoding: one invocation a channel. The state is updated in place.

override K: u32 = 4;           // taps
override SILU: bool = true;
override HAS_BIAS: bool = false;

struct Params {
    batch: u32,
    width: u32,
    x: vec2<u32>,        // views: offset and row stride, in elements
    w: vec2<u32>,
    bias: vec2<u32>,
    state: vec2<u32>,
    y: vec2<u32>,
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> x_in: array<f32>;
@group(0) @binding(1) var<storage, read> w_in: array<f32>;
@group(0) @binding(2) var<storage, read> bias_in: array<f32>;
@group(0) @binding(3) var<storage, read_write> state_io: array<f32>;
@group(0) @binding(4) var<storage, read_write> y_out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let batch = i / params.width;
    let e = i % params.width;
    if batch >= params.batch {
        return;
    }
    let x = x_in[params.x.x + batch * params.x.y + e];
    var sum = 0.0;
    if HAS_BIAS {
        sum = bias_in[params.bias.x + e];
    }
    let taps = params.w.x + e * params.w.y;
    sum = fma(w_in[taps], x, sum);
    let state = params.state.x + batch * (K - 1u) * params.state.y + e;
    for (var k = 1u; k < K; k = k + 1u) {
        sum = fma(w_in[taps + k], state_io[state + ((K - 1u) - k) * params.state.y], sum);
    }
    // Entry 0 is the oldest.
    for (var k = 0u; k + 1u < K; k = k + 1u) {
        var next = x;
        if k + 2u < K {
            next = state_io[state + (k + 1u) * params.state.y];
        }
        state_io[state + k * params.state.y] = next;
    }
    if SILU {
        sum = silu(sum);
    }
    y_out[params.y.x + batch * params.y.y + e] = sum;
}
