// The selective scan forward (SPEC 2.6 to 2.10) without subgroup operations: one invocation walks one
// channel of one batch row, T steps of four states at a time, so that only the current T steps' inputs
// and sums are alive. The state before every T steps is kept for the backward pass (KEEP); nothing of
// the size (B, L, E, N) exists.
//
// `packed` is described in scan_pack.wgsl. Segment s of a batch row begins at chunk
// s * segment_chunks from the state kept there, so that segments run side by side.

//#include scan_math

override NJ: u32 = 4;          // vec4 of states a channel
override T: u32 = 8;           // steps between kept states
override ZOH: bool = true;
override SOFTPLUS: bool = true;
override GATED: bool = true;
override MASKED: bool = false;  // there are restarts or lengths
override KEEP: bool = true;     // keep the states for the backward pass

struct Params {
    batch: u32,
    length: u32,
    row_step: u32,       // rows from one batch row to the next
    width: u32,
    states: u32,
    slots: u32,          // kept states a batch row: chunks with KEEP, else segments
    segments: u32,
    segment_chunks: u32,
    rows_at: u32,        // offsets in packed, in vec4
    flags_at: u32,
    u: vec2<u32>,        // views: offset and row stride, in elements
    delta: vec2<u32>,
    z: vec2<u32>,
    y: vec2<u32>,
    final_state: vec2<u32>,
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> u_in: array<f32>;
@group(0) @binding(1) var<storage, read> delta_in: array<f32>;
@group(0) @binding(2) var<storage, read> z_in: array<f32>;
@group(0) @binding(3) var<storage, read> packed: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> kept: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> y_out: array<f32>;
@group(0) @binding(6) var<storage, read_write> final_out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = group.x * 64u + lane;
    let batch = group.y;
    let segment = group.z;
    if e >= params.width {
        return;
    }
    let vectors = packed[e * (NJ + 1u) + NJ];
    let chunks = (params.length + T - 1u) / T;
    let first = segment * params.segment_chunks;
    let end = min(first + params.segment_chunks, chunks);
    let quads = (params.length + 3u) / 4u;

    var h: array<vec4<f32>, NJ>;
    let start = select(segment, first, KEEP);
    for (var j = 0u; j < NJ; j = j + 1u) {
        h[j] = kept[((batch * params.slots + start) * params.width + e) * NJ + j];
    }
    for (var chunk = first; chunk < end; chunk = chunk + 1u) {
        let t0 = chunk * T;
        var steps: array<f32, T>;
        var inputs: array<f32, T>;
        var sums: array<f32, T>;
        var flags: array<f32, T>;
        for (var i = 0u; i < T; i = i + 1u) {
            let t = t0 + i;
            var flag = 2.0;
            if t < params.length {
                flag = 0.0;
                if MASKED {
                    flag = packed[params.flags_at + batch * quads + t / 4u][t % 4u];
                }
            }
            flags[i] = flag;
            steps[i] = 0.0;
            inputs[i] = 0.0;
            if flag < 2.0 {
                let row = batch * params.row_step + t;
                let raw = delta_in[params.delta.x + row * params.delta.y + e] + vectors.x;
                var step = raw;
                if SOFTPLUS {
                    step = softplus(raw);
                }
                let x = u_in[params.u.x + row * params.u.y + e];
                sums[i] = vectors.y * x;
                steps[i] = step;
                // The exponential below loses a NaN in Delta: the input takes it along.
                inputs[i] = select(select(step * x, x, ZOH), raw, is_nan(raw));
            } else {
                sums[i] = 0.0;
            }
        }
        for (var j = 0u; j < NJ; j = j + 1u) {
            let a = packed[e * (NJ + 1u) + j];
            let a2 = a * LOG2E;
            let ia = 1.0 / a;
            var state = h[j];
            if KEEP && chunk > first {
                kept[((batch * params.slots + chunk) * params.width + e) * NJ + j] = state;
            }
            for (var i = 0u; i < T; i = i + 1u) {
                let row = params.rows_at + (batch * params.length + min(t0 + i, params.length - 1u)) * (2u * NJ);
                let vb = packed[row + j];
                let vc = packed[row + NJ + j];
                if MASKED && flags[i] == 1.0 {
                    state = vec4<f32>(0.0);
                }
                let e2 = exp2_parts(steps[i] * a2);
                if ZOH {
                    state = decayed(e2, state) + minus_one(e2) * (inputs[i] * vb * ia);
                } else {
                    state = decayed(e2, state) + inputs[i] * vb;
                }
                sums[i] = sums[i] + dot(state, vc);
            }
            h[j] = state;
        }
        for (var i = 0u; i < T; i = i + 1u) {
            let t = t0 + i;
            if t < params.length {
                let row = batch * params.row_step + t;
                var out = sums[i];
                if GATED {
                    let gate = z_in[params.z.x + row * params.z.y + e];
                    out = out * (gate * sigmoid(gate));
                }
                y_out[params.y.x + row * params.y.y + e] = select(out, 0.0, flags[i] == 2.0);
            }
        }
    }
    if segment == params.segments - 1u {
        for (var n = 0u; n < params.states; n = n + 1u) {
            let row = batch * params.width + e;
            final_out[params.final_state.x + row * params.final_state.y + n] = h[n / 4u][n % 4u];
        }
    }
}
