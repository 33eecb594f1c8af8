// The selective scan forward for 13 to 16 states, with subgroup operations: four lanes a channel, 32
// channels a workgroup. Tiles of 16 steps go through workgroup memory: one invocation computes Delta for a
// channel and step that four lanes then use, and all loads are of 32 neighbouring channels. While a tile is
// computed, the loads of the next one are on their way; two tiles take turns, so that one barrier a tile
// is enough. Sums over the lanes of a channel are made for four steps at a time, by three shuffles, which
// leave each lane the sum of one step to gate and store.
//
// `packed` is described in scan_pack.wgsl, segments in scan_forward.wgsl.

//#include scan_quad

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
    segment_chunks: u32, // even
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

const TILE: u32 = 16;

var<workgroup> inputs: array<vec2<f32>, 1024>;  // [2][TILE][WIDTH] of (Delta, u)
var<workgroup> weights: array<vec4<f32>, 256>;  // [2][TILE][b, c][4]
var<workgroup> flags: array<f32, 32>;           // [2][TILE]

struct Loaded {
    delta: vec4<f32>,    // of four steps
    u: vec4<f32>,
    weight: vec4<f32>,
    flag: f32,
}

// What invocation `lane` fetches for the tile at t0: steps lane / 32 + 0, 4, 8, 12 of channel e, and one vec4
// of b and c.
fn fetch(batch: u32, t0: u32, e: u32, lane: u32) -> Loaded {
    var loaded: Loaded;
    let last = params.length - 1u;
    let base = batch * params.row_step;
    let t = t0 + lane / WIDTH;
    let rows = base + min(vec4<u32>(t, t + 4u, t + 8u, t + 12u), vec4<u32>(last));
    let at_d = params.delta.x + e + rows * params.delta.y;
    let at_u = params.u.x + e + rows * params.u.y;
    loaded.delta = vec4<f32>(delta_in[at_d.x], delta_in[at_d.y], delta_in[at_d.z], delta_in[at_d.w]);
    loaded.u = vec4<f32>(u_in[at_u.x], u_in[at_u.y], u_in[at_u.z], u_in[at_u.w]);
    let row = batch * params.length + min(t0 + lane / 8u, last);
    loaded.weight = packed[params.rows_at + row * 8u + lane % 8u];
    loaded.flag = 2.0;
    if lane < TILE && t0 + lane < params.length {
        loaded.flag = 0.0;
        if MASKED {
            let quads = (params.length + 3u) / 4u;
            loaded.flag = packed[params.flags_at + batch * quads + (t0 + lane) / 4u][lane % 4u];
        }
    }
    return loaded;
}

// One step of one channel into workgroup memory.
fn put_step(raw: f32, u: f32, batch: u32, t: u32, at: u32) {
    var step = raw;
    if SOFTPLUS {
        step = softplus(raw);
    }
    var beyond = t >= params.length;
    if MASKED && !beyond {
        let quads = (params.length + 3u) / 4u;
        beyond = packed[params.flags_at + batch * quads + t / 4u][t % 4u] == 2.0;
    }
    // The exponential loses a NaN in Delta: the input takes it along.
    inputs[at] = select(vec2<f32>(step, select(u, raw, is_nan(raw))), vec2<f32>(0.0), beyond);
}

fn put(loaded: Loaded, bias: f32, batch: u32, t0: u32, lane: u32, turn: u32) {
    let t = t0 + lane / WIDTH;
    let at = turn * TILE * WIDTH + lane;
    put_step(loaded.delta.x + bias, loaded.u.x, batch, t, at);
    put_step(loaded.delta.y + bias, loaded.u.y, batch, t + 4u, at + 4u * WIDTH);
    put_step(loaded.delta.z + bias, loaded.u.z, batch, t + 8u, at + 8u * WIDTH);
    put_step(loaded.delta.w + bias, loaded.u.w, batch, t + 12u, at + 12u * WIDTH);
    weights[turn * 128u + lane] = loaded.weight;
    if lane < TILE {
        flags[turn * TILE + lane] = loaded.flag;
    }
}

// What does not change along a channel, for one lane of it.
struct Channel {
    q: u32,
    number: u32,         // in the workgroup
    e: u32,
    inside: bool,
    batch: u32,
    a2: vec4<f32>,
    ia: vec4<f32>,
    skip: f32,
}

// Four steps from t on, which are `part` quarters into the tile; returns the state after them.
fn walk(c: Channel, before: vec4<f32>, turn: u32, part: u32, t: u32, end: u32, gate: f32) -> vec4<f32> {
    let input_at = (turn * TILE + 4u * part) * WIDTH + c.number;
    let weight_at = turn * 128u + 32u * part + c.q;
    let flag_at = turn * TILE + 4u * part;
    let x0 = inputs[input_at];
    let x1 = inputs[input_at + WIDTH];
    let x2 = inputs[input_at + 2u * WIDTH];
    let x3 = inputs[input_at + 3u * WIDTH];
    var h = before;
    if MASKED && flags[flag_at] == 1.0 { h = vec4<f32>(0.0); }
    h = advance(h, x0.x, x0.y, weights[weight_at], c.a2, c.ia).h;
    let y0 = dot(h, weights[weight_at + 4u]);
    if MASKED && flags[flag_at + 1u] == 1.0 { h = vec4<f32>(0.0); }
    h = advance(h, x1.x, x1.y, weights[weight_at + 8u], c.a2, c.ia).h;
    let y1 = dot(h, weights[weight_at + 12u]);
    if MASKED && flags[flag_at + 2u] == 1.0 { h = vec4<f32>(0.0); }
    h = advance(h, x2.x, x2.y, weights[weight_at + 16u], c.a2, c.ia).h;
    let y2 = dot(h, weights[weight_at + 20u]);
    if MASKED && flags[flag_at + 3u] == 1.0 { h = vec4<f32>(0.0); }
    h = advance(h, x3.x, x3.y, weights[weight_at + 24u], c.a2, c.ia).h;
    let y3 = dot(h, weights[weight_at + 28u]);

    var out = sum_quads(vec4<f32>(y0, y1, y2, y3), c.q);
    out = fma(c.skip, inputs[input_at + c.q * WIDTH].y, out);
    if GATED {
        out = out * silu(gate);
    }
    if MASKED {
        out = select(out, 0.0, flags[flag_at + c.q] == 2.0);
    }
    if c.inside && t + c.q < end {
        y_out[params.y.x + (c.batch * params.row_step + t + c.q) * params.y.y + c.e] = out;
    }
    return h;
}

// Keeps the state before step t, except a segment's first, which is there already.
fn keep(c: Channel, h: vec4<f32>, t: u32, first: u32, end: u32) {
    if KEEP && c.inside && t < end && t > first {
        kept[((c.batch * params.slots + t / 8u) * params.width + c.e) * 4u + c.q] = h;
    }
}

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    //#if EMULATED
    @builtin(local_invocation_index) lane: u32,
    //#else
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_lanes: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    //#endif
) {
    //#if EMULATED
    exchange_lane = lane;
    //#else
    let lane = subgroup * subgroup_lanes + subgroup_lane;
    //#endif
    let q = lane % 4u;
    let channel = lane / 4u;
    let e_loads = min(group.x * WIDTH + lane % WIDTH, params.width - 1u);
    let inside = group.x * WIDTH + channel < params.width;
    let e = min(group.x * WIDTH + channel, params.width - 1u);
    let batch = group.y;
    let segment = group.z;
    let a = packed[e * 5u + q];
    let c = Channel(q, channel, e, inside, batch, a * LOG2E, 1.0 / a, packed[e * 5u + 4u].y);
    let bias = packed[e_loads * 5u + 4u].x;
    let chunks = (params.length + 7u) / 8u;
    let first = segment * params.segment_chunks;
    let end = min((first + params.segment_chunks) * 8u, params.length);

    var h = kept[((batch * params.slots + select(segment, first, KEEP)) * params.width + e) * 4u + q];
    var t0 = first * 8u;
    put(fetch(batch, t0, e_loads, lane), bias, batch, t0, lane, 0u);
    workgroupBarrier();
    var turn = 0u;
    while t0 < end {
        let loaded = fetch(batch, min(t0 + TILE, params.length - 1u), e_loads, lane);
        var gates = vec4<f32>(0.0);
        if GATED {
            let t = min(vec4<u32>(t0 + q) + vec4<u32>(0u, 4u, 8u, 12u), vec4<u32>(params.length - 1u));
            let at = params.z.x + e + (batch * params.row_step + t) * params.z.y;
            gates = vec4<f32>(z_in[at.x], z_in[at.y], z_in[at.z], z_in[at.w]);
        }
        keep(c, h, t0, first * 8u, end);
        h = walk(c, h, turn, 0u, t0, end, gates.x);
        h = walk(c, h, turn, 1u, t0 + 4u, end, gates.y);
        keep(c, h, t0 + 8u, first * 8u, end);
        h = walk(c, h, turn, 2u, t0 + 8u, end, gates.z);
        h = walk(c, h, turn, 3u, t0 + 12u, end, gates.w);
        t0 = t0 + TILE;
        turn = 1u - turn;
        put(loaded, bias, batch, t0, lane, turn);
        workgroupBarrier();
    }
    if inside && segment == params.segments - 1u {
        let at = params.final_state.x + (batch * params.width + e) * params.final_state.y + 4u * q;
        for (var k = 0u; k < 4u; k = k + 1u) {
            if 4u * q + k < params.states {
                final_out[at + k] = h[k];
            }
        }
    }
}
