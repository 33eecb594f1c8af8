// The channels' part of what scan_pack.wgsl describes, and the state from which a piece begins.

// Nearer to 0 the difference from 0 is beyond float32 for every Delta, and 1 / A would overflow.
const SMALLEST_A: f32 = 1e-12;

override NJ: u32 = 4;
override HAS_DELTA_BIAS: bool = false;
override HAS_D: bool = false;
override HAS_INITIAL: bool = false;

struct Params {
    batch: u32,
    width: u32,
    states: u32,
    slots: u32,          // kept states a batch row
    slot: u32,           // the one that is written
    unused: u32,
    a: vec2<u32>,        // views: offset and row stride, in elements
    d: vec2<u32>,
    delta_bias: vec2<u32>,
    initial: vec2<u32>,
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> a_in: array<f32>;
@group(0) @binding(1) var<storage, read> d_in: array<f32>;
@group(0) @binding(2) var<storage, read> bias_in: array<f32>;
@group(0) @binding(3) var<storage, read> initial_in: array<f32>;
@group(0) @binding(4) var<storage, read_write> packed: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> kept: array<vec4<f32>>;

// One invocation for four states of one channel, or for the channel's vectors.
@compute @workgroup_size(64)
fn pack_channels(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_index(group, groups) * 64u + lane;
    let e = i / (NJ + 1u);
    let j = i % (NJ + 1u);
    if e >= params.width {
        return;
    }
    var v = vec4<f32>(-1.0);
    if j == NJ {
        v = vec4<f32>(0.0);
        if HAS_DELTA_BIAS {
            v.x = bias_in[params.delta_bias.x + e];
        }
        if HAS_D {
            v.y = d_in[params.d.x + e];
        }
    } else {
        for (var k = 0u; k < 4u; k = k + 1u) {
            let n = 4u * j + k;
            if n < params.states {
                let x = a_in[params.a.x + e * params.a.y + n];
                v[k] = select(x, select(-SMALLEST_A, SMALLEST_A, x > 0.0), abs(x) < SMALLEST_A);
            }
        }
    }
    packed[i] = v;
}

// One invocation for four states of one channel of one batch row: a slot of its kept states (or, in the
// backward pass, of its gradients).
@compute @workgroup_size(64)
fn pack_initial(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_index(group, groups) * 64u + lane;
    let row = i / NJ;
    let j = i % NJ;
    let batch = row / params.width;
    if batch >= params.batch {
        return;
    }
    var v = vec4<f32>(0.0);
    if HAS_INITIAL {
        for (var k = 0u; k < 4u; k = k + 1u) {
            let n = 4u * j + k;
            if n < params.states {
                v[k] = initial_in[params.initial.x + row * params.initial.y + n];
            }
        }
    }
    kept[((batch * params.slots + params.slot) * params.width + row % params.width) * NJ + j] = v;
}
