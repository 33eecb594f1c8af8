// Adds up what the workgroups of the scan's backward pass left in `scratch` (its layout is in
// scan_backward.wgsl), always in the same order.

override NJ: u32 = 4;
override HAS_D_A: bool = false;
override HAS_D_D: bool = false;
override HAS_D_BIAS: bool = false;

struct Params {
    batch: u32,
    length: u32,
    row_step: u32,       // rows from one batch row to the next
    width: u32,
    states: u32,
    segments: u32,
    blocks: u32,
    at: u32,             // where the part that is read begins, in vec4
    d_vectors_at: u32,
    unused: u32,
    first: vec2<u32>,    // views: offset and row stride, in elements; dB, or d_a, or the state's gradient
    second: vec2<u32>,   // dC, or d_d
    third: vec2<u32>,    // d_delta_bias
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> scratch: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> db_out: array<f32>;
@group(0) @binding(2) var<storage, read_write> dc_out: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_a_out: array<f32>;
@group(0) @binding(4) var<storage, read_write> d_d_out: array<f32>;
@group(0) @binding(5) var<storage, read_write> d_bias_out: array<f32>;
@group(0) @binding(6) var<storage, read_write> state_out: array<f32>;

// One invocation for four states of dB or dC of one row: the shares of the blocks of channels.
@compute @workgroup_size(64)
fn reduce_rows(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let rows = params.batch * params.length;
    let row = i / (2u * NJ);
    let j = i % NJ;
    if row >= rows {
        return;
    }
    var total = vec4<f32>(0.0);
    for (var block = 0u; block < params.blocks; block = block + 1u) {
        total = total + scratch[params.at + block * rows * (2u * NJ) + i];
    }
    let target_row = (row / params.length) * params.row_step + row % params.length;
    for (var k = 0u; k < 4u; k = k + 1u) {
        let n = 4u * j + k;
        if n < params.states {
            if i % (2u * NJ) < NJ {
                db_out[params.first.x + target_row * params.first.y + n] = total[k];
            } else {
                dc_out[params.second.x + target_row * params.second.y + n] = total[k];
            }
        }
    }
}

// One invocation for four states of one channel, or for the channel's vectors: the shares of the batch
// rows and segments, added to what is there.
@compute @workgroup_size(64)
fn reduce_channels(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                   @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let e = i / (NJ + 1u);
    let j = i % (NJ + 1u);
    if e >= params.width {
        return;
    }
    let places = params.batch * params.segments;
    var total = vec4<f32>(0.0);
    if j < NJ {
        if HAS_D_A {
            for (var k = 0u; k < places; k = k + 1u) {
                total = total + scratch[params.at + (k * params.width + e) * NJ + j];
            }
            for (var k = 0u; k < 4u; k = k + 1u) {
                let n = 4u * j + k;
                if n < params.states {
                    let place = params.first.x + e * params.first.y + n;
                    d_a_out[place] = d_a_out[place] + total[k];
                }
            }
        }
        return;
    }
    for (var k = 0u; k < places; k = k + 1u) {
        total = total + scratch[params.d_vectors_at + k * params.width + e];
    }
    if HAS_D_BIAS {
        d_bias_out[params.third.x + e] = d_bias_out[params.third.x + e] + total.x;
    }
    if HAS_D_D {
        d_d_out[params.second.x + e] = d_d_out[params.second.x + e] + total.y;
    }
}

// One invocation for four states of one channel of one batch row: the gradient of the initial state.
@compute @workgroup_size(64)
fn unpack_state(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let row = i / NJ;
    let j = i % NJ;
    let batch = row / params.width;
    if batch >= params.batch {
        return;
    }
    let v = scratch[(batch * params.segments * params.width + row % params.width) * NJ + j];
    for (var k = 0u; k < 4u; k = k + 1u) {
        let n = 4u * j + k;
        if n < params.states {
            state_out[params.first.x + row * params.first.y + n] = v[k];
        }
    }
}
