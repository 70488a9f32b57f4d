/* plan_costs.h — every tunable of the planner, with unit and origin. */
#ifndef KOILA_SRC_PLAN_COSTS_H
#define KOILA_SRC_PLAN_COSTS_H

/* Time is estimated in bytes moved through memory. One floating-point multiply-add of a dense
 * kernel (matrix product, convolution, attention) costs as much as 1/8 byte: about 80 Gflop/s
 * beside 10 GB/s on a desktop core; GPUs have a similar ratio. Only ratios of plans matter. */
#define KOILA_COST_BYTES_PER_MULTIPLY_ADD 0.125

/* A comparison of a max-pooling window is not vectorised: measured 5 ns each on a CPU core (torch
 * 2.13), against 0.06 ns a multiply-add. */
#define KOILA_COST_MULTIPLY_ADDS_PER_COMPARISON 64.0

/* A random number is drawn one by one on a CPU: 6 to 8 ns for the mask of a dropout (torch 2.13),
 * against 0.06 ns a multiply-add. */
#define KOILA_COST_MULTIPLY_ADDS_PER_DRAW 128.0

/* An operator is expensive (worth keeping its result rather than running it again) when its
 * multiply-adds cost more than moving its bytes. */
#define KOILA_COST_EXPENSIVE_RATIO 1.0

/* A cheap operator's result is worth keeping too when recomputing it from kept values moves this
 * many times its bytes: eight pointwise operators read and write 16 times their size. This bounds
 * the recomputation of a chain of barriers without dense kernels. */
#define KOILA_COST_CHAIN 32.0

/* What starting a copy to host memory or back costs, in bytes that are copied meanwhile: 10 us at
 * 25 GB/s. */
#define KOILA_COST_BYTES_PER_OFFLOAD 262144.0
/* A value of less than this share of what is held is not moved: it would save nothing. */
#define KOILA_COST_FEWEST_OFFLOADED 1024

/* Limits of a schedule: loops, and instructions emitted per needed operator. Beyond them a policy
 * is refused: nobody wants more than a few times the work. */
#define KOILA_COST_MAX_LOOPS 8192
#define KOILA_COST_MAX_INSTRS 64
/* The same for recomputing everything when that policy was not requested: about five times the
 * work. */
#define KOILA_COST_MAX_INSTRS_AUTO 12

/* With forced rows and no budget: the least memory among the policies that cost at most this many
 * times the cheapest one. */
#define KOILA_COST_MODERATE 2.0

/* A step of at most so many calls in its forward pass takes the time to refine each way to drop
 * results: a millisecond in all. */
#define KOILA_COST_SMALL_STEP 32
/* One of more than so many nodes is refined for the budget alone, unless nothing fits: choices that
 * depend on no budget take half the time of planning it. */
#define KOILA_COST_LARGE_STEP 256
/* Above so many calls by moves, more of them move at a time. */
#define KOILA_COST_MOVES 2048

/* What is bound to need so many times what is free beside the results of the step is not refined,
 * nor all of it tried. */
#define KOILA_COST_HOPELESS 2

/* A choice of what is dropped that needs more than so many times the budget is not changed a
 * little, in the hope that it fits then: loops apart need 12 to 14 % less, in steps of
 * bench/README.md. */
#define KOILA_COST_IN_REACH 1.25

/* Where all segments need more than so many times the budget, single calls are not chosen before
 * other axes are tried: they need 22 % less in a GPT-2 of bench/README.md. */
#define KOILA_COST_LEFT_TO_AXES 1.4

/* What calling an operator takes whatever its operands, in bytes moved meanwhile: 9 us at 10 GB/s.
 * Measured on a CPU core (torch 2.13): the time of a step in slices of 64 tokens, less that in
 * slices of 512, by the calls that it makes more. A GPU moves more meanwhile, so there thin slices
 * are worse than this says. */
#define KOILA_COST_BYTES_PER_CALL 90000.0

/* A way along another axis that takes at most so many times the time of the step as recorded is not
 * compared with dropping results: finding those takes the time of planning once more. */
#define KOILA_COST_COMPARED 1.05

/* Planning takes about so many ns a recorded node where something fits in little time: that is not
 * compared with more once they are spent. A step of few nodes takes the time in any case. */
#define KOILA_COST_NS_ALLOWED 1000.0
#define KOILA_COST_NS_AT_LEAST 200000.0
/* What the passes take, in ns a node of the graph that they go over. Measured on a CPU core (Xeon,
 * 2.1 GHz) for the models of bench/README.md: only their ratios matter. */
#define KOILA_COST_NS_PLACE 250.0    /* placing */
#define KOILA_COST_NS_LOOPS 200.0    /* finding the loops */
#define KOILA_COST_NS_POLICY 20.0    /* the work of a policy */
#define KOILA_COST_NS_SCHEDULE 170.0 /* its instructions */
#define KOILA_COST_NS_LIVE 6.0       /* its peak */
#define KOILA_COST_NS_OUTLINE 100.0  /* outlining what may be dropped */
#define KOILA_COST_NS_CHOICE 15.0    /* a choice of it, and its bound */
#define KOILA_COST_NS_AGAIN 110.0    /* writing the step that follows from one */
#define KOILA_COST_NS_UNROLL 350.0   /* telling slices as calls of their own */

/* A step whose forward pass is computed twice: the backward pass is about twice as much work. */
#define KOILA_COST_FORWARD_AGAIN 1.33

/* Frontier policies: loops between checkpoints, as multiples of sqrt(loops). */
#define KOILA_SPACING_FACTORS { 0.5, 0.7, 1.0 }

#endif
