"""The numbers that planning for CPUs is by, each with what it is and where it comes from."""

from tilewright.target import Target

# Chosen so that predictions meet kernels that were measured, on a Neoverse N1 and on servers with AVX-512; `python -m
# bench.judge` says whether another number orders measured plans better. What a machine can be asked for is in its
# description instead.
AMX_LINES_A_CYCLE = 2  # lines that the first cache gives in a cycle
AMX_BLOCK_CYCLES = 150.0  # of a block's start and end: registers cleared, the last product waited for, registers stored
AMX_COPY_CYCLES = 2.0  # of a line copied into scratch that stays near
AMX_PLACE_CYCLES = 10.0  # of a window's copy: where one of its places is, and whether that is inside
AMX_EXPOSED = 0.2  # of what comes from the second cache while the products run
AMX_UNEVEN = 1.5  # lines on one set of the first cache, over what an even fall would be
FULL = 0.75  # of the tile level holds what is used again; the rest is for what passes
NEAR_FULL = 0.5  # of the nearest cache, the same in the steps of a Scan
AMX_STAYS = 16 << 10  # bytes of columns that stay in the first cache beside a block of rows, of 48 KB at least
ROWS_AHEAD = 4  # rows whose next line a step asks for beside its own, where they are copied before they are read
WINDOW_OVERHEAD = 1.2  # times what the instructions of a depthwise window alone take
WINDOW_WITHOUT = 5.0  # times as long where a tile has fewer channels than a block, and sums as any nest does
# Cycles to start a nest on a part. Parts are loops inside the tile, without a call or a counter that units share, so
# this is no hand-out (`Target.tile_cost`): addresses, constants and, of loops too long to be remembered, one branch
# that is mispredicted (11 cycles on a Neoverse N1, 14 to 17 on x86; a Xeon that predicted all of them took 5).
PART_CYCLES = 10
EXPOSED = 0.5  # of what moves, or of the arithmetic beside it, that is not hidden
BEYOND_A_RUN = 2  # lines that prefetchers bring for nothing where a run ends, or not in time where one begins
# To start a tile: a call, a few divisions. Handing one out is measured, and as long where a description says nothing.
TILE_SECONDS = Target.tile_cost
TILE_FAR_EXPOSED = 0.5  # of the time to and from main memory that arithmetic does not hide
PREFETCHED_EXPOSED = 0.1  # of the time of weights that are asked for while others are multiplied
NEAR_EXPOSED = 0.2  # of the time of the caches
SHARED_COST = 3.0  # times the cost of a kernel of one tile: workers must meet before and after
SHARED_STEP = 1.0  # the same for the steps of a Scan: workers know their tiles, and are there already
STEP_ALONE = 0.0  # and for a step of one tile
FOREIGN = 5.0  # times what a line of the outer cache takes: one that another unit has just written
OFTEN = 4  # times that tiles which are less than whole come to a unit, for units to have the same number of them
NEARLY_WHOLE = 0.8  # of a tile: of smaller ones units that take turns get uneven numbers
EVENED = 0.8  # of what such tiles are less than whole that is gained
SHARE_OF_L1 = 8  # what is asked for early may push out at most this part of the nearest cache
OVERFULL = 1.8  # times its capacity: of so much, walked one way, a cache finds nothing again
INSTRUCTION_OVERHEAD = 1.15  # times what the instructions alone take
INSTRUCTION_LATENCY = 4  # cycles of a dot product, within one on every core we know
STEP_STALL = 0.55  # of what bringing weights from the tile level delays a contraction, in a step
ISSUED = 4.0  # instructions a cycle that the processors we know take up
ISSUED_IN_ORDER = 2.0  # the same of a block written out whole, where most wait for others
LOOKED_AHEAD = 200.0  # instructions that they see at once: short blocks run into each other and hide their chains
BESIDE = 0.1  # of what the less busy ports do that is not wholly beside the busiest
CALL_ALONE = 1.25  # times as long for a function of vector mathematics by itself as for as many as run side by side
LOADED = 6.0  # cycles from a read of the nearest cache to its use
FORESEEN = 32.0  # turns of a loop whose end the processor foresees
MISSED = 16.0  # cycles where a loop's end is not foreseen
BLOCK_CYCLES = 14.0  # cycles to start and end a block's loop over a sum: addresses, the first loads, the last adds
RESUMED = 180.0  # cycles to resume a block of a contraction in another pass: its rows and its panel are cold again
LANE_STORE = 1.0  # cycles of a lane that is stored alone, its line not the next one's
FAR_LANE_STORE = 2.2  # cycles of such a lane where the line is gone from the first cache when its next lane comes
TRANSPOSED_STORE = 0.25  # of a lane that is transposed with its neighbours first
FAR_STEP = 128  # bytes from one step of a reduction to the next that are not one stream
FAR_ROWS = 1024  # bytes from row to row that no prefetcher follows
NEAR_ROOM = 0.75  # of the first cache, for a part of the rows and a panel; results pass through the rest
NEAR_AGAIN = 0.5  # of the tile level, for the panels that pass by every part
STEP_CYCLES = 0.2  # of a step of a contraction: loop counter, what the scheduler loses
CHECK_CYCLES = 8.0  # of one question whether a window lies inside, for a whole register tile
ASKED_CYCLES = 0.15  # of one such question for a single element of a dot product, most of them foreseen
SPILLED = 1.8  # times as long for a step whose accumulators find no register
SCATTERED = 1.5  # times its bytes: what of a cache an operand takes whose steps are lines apart
CROWDED = 2.0  # times a line comes again that is thrown out before it is used up
RUN_HIDDEN = 0.3  # of the arithmetic's time a run from the next cache may take and not be seen
RUN_STALL = 1.0  # of what a run takes longer than that, that is seen
RUN_EXPOSED = 0.06  # of the time a contiguous run takes from the next cache that arithmetic does not hide
ROWS_EXPOSED = 0.1  # of the time that as many streams take as the register tile has rows: the prefetcher follows few
DOT_STREAMS = 1.3  # of the time the rows of dot products take from the next cache: a stream for each, side by side
FAR_EXPOSED = 0.15  # of the time that what comes from beyond the tile level once more takes, beside arithmetic
# The same beside weights that pass by in panels, which hardware follows first. On a Cascade Lake server all is seen:
# 128 rows of 3072 elements, more than its second cache holds, take 1.7 ms beyond the arithmetic for 22 MB that come
# again with the panels. Half is enough to have passes chosen there; other machines were not asked.
AGAIN_EXPOSED = 0.5
GATHER_ROWS = 12  # rows of a register tile that share a gathered vector
COPY_STORE = 0.25  # of a transposed element stored, and the loop around it
COPY_RUN = 0.6  # of an element of a copy that keeps its order
CUT_PANELS = 3.0  # times a sum takes whose vectors begin inside panels: 4.5 ms for 1.6 on Cascade Lake (SqueezeNet)
CROWDED_SUM = 1.4  # times a sum takes whose columns come from the second cache for every few rows
AHEAD_STEPS = 4  # steps of a sum of rows, until what it asks for is there
SOON_EARLY = 8  # steps of a dozen cycles: several times what a line takes from the tile level
SOON_TOGETHER = 2  # lines that a step asks for

# Counted in the code that lowering writes, and in what compilers make of it.
WINDOW_SPARE = 6  # registers for operands beside the accumulators of a depthwise window
WINDOW_FILL = 24  # instructions that read, interleave and keep four taps of a block of channels at one position
STREAM_STEP = 12.0  # operations to bring one carried value from block to block, where it follows another
CARRIED = 2.0  # operations to bring on one that follows none: a load and a store
TURN = 2.0  # instructions of a turn of a loop besides its work: the counter and the branch
LOOP_START = 6.0  # instructions to start a loop: addresses, bounds
WINDOW_CHECK = 4.0  # instructions of a question whether a window lies inside, for a whole block
EVERY_OTHER = 3.0  # reads for a wide vector whose lanes are two elements apart: two, and a shuffle
VECTORS_AT_ONCE = 2  # of an operand that wait in registers where rows do
TRANSPOSED_VECTOR = 2.0  # instructions for a vector that is transposed from another axis

# Margins: what is predicted to gain less is taken for the model's error, or for not worth its complication.
AMX_LEAST_HEIGHT = 11  # rows of a register that are worth dividing a row of an image for
TWICE = 2  # times what a nest computes for the tile, or more: a sum over all rows of it does, in any parts
INNER_WORTH_TRYING = 0.01  # of the kernel's time that moving this at the kernel's level must take
WORTH_A_LOOK = 3.0  # times the best prediction; what is predicted to be slower is not measured
WORST_VECTOR = 8.0  # times the cost of the best vector axis: beyond it nothing would make up for the choice
PACKED_LEAST_ROWS = 16  # rows that use b, where it must be packed first in every tile
LEAST_FILL = 0.2  # of the groups: below that, multiplying zeros costs more than the instruction saves
LEAF_WORTH = 0.98  # of the time that a leaf takes by itself, where another is tried: less is within the model's error
FORM_WORTH = 0.97  # of the first form's time: less is within the model's error
PARTLY = 8  # lanes from which on rows are often shorter than a vector, and their ends cost as much as it
VECTOR_NEAR = 3.0  # times the cost of the cheapest vector axis: another one is still compared
VECTORS_WIDE = 4  # vectors along an output axis: lanes along the reduction cannot be fuller
DOT_WORTH = 1.05  # times as long: lanes that fold at the end must promise so much more
FEWER_WORTH = 0.98  # of the time with as many as there may be: less is within the model's error
LONG_OPERANDS = 2  # times the first cache: operands of a register tile beyond that may be worth passes
PASSES_WORTH = 1.02  # times as long: passes must promise so much more
REST_WORTH = 1.015  # times as long: rows left over must promise so much more, since they run less evenly than predicted
LONG_EPILOGUE = 8  # slots of what follows a sum, beside which a store and a read are little
COPY_GAIN = 0.9  # of the time without a copy, what must be left with it
AHEAD_WORTH = 1 / 32  # of the arithmetic's time, what reading the weights takes at least

# How much is looked at: what bounds the time that planning takes.
WINDOW_MOST_ROWS = 4  # rows of a block of a depthwise window
INNER_MOST_RUNS = 6  # runs of nests that are tried, those that pass and read again most first
INNER_PIECES = (2, 3, 4, 6, 8, 12, 16)  # parts of an axis that are tried
MOST_CANDIDATES = 2000  # tiles of a kernel that are priced in one batch
STEP_ROWS = (1, 2, 4, 8, 16, 32)  # rows of a root that a window moves on by
MOST_REFUSED = 8  # tiles that windows do not move in, looked at one by one
ENOUGH_TILES = 8  # tiles along other axes
FEW_TILES = 4  # tiles along an axis: with so few the even cut counts for more than the last register tile
VARIANT_CHOICES = 240  # nest plans that are predicted when variants are ranked
ROUGH_TILES = 40  # tiles that nest plans are compared over, before all tiles of the best
TILES_A_CHOICE = 3  # tiles of the same nest plans that are worth a look
CANDIDATE_ROWS = 12  # of a register tile that tuning tries
CANDIDATE_COLUMNS = 8  # vectors of a register tile that tuning tries
CANDIDATE_CHAINS = (1, 2, 4, 8)  # vectors side by side of a reduction that tuning tries
INSTRUCTION_ROWS = 12  # of a register tile of dot products
MOST_LEAVES = 2  # other forms of a leaf that are tried
MOST_FORMS = 4  # orders and passes that are compared, the best register tile of each
RANKED_PLANS = 40  # plans that the construction ranks, among which forms are looked for
ROWS_OF_A_PASS = 16  # between which partial sums wait in the result's place
SHARED_WINDOW = 7  # steps along a window that rows share
SHORT_SUM = 7  # vectors of a short reduction that is written out
REDUCTION_COUNTS = (1, 2, 3, 4, 6, 8, 12)  # vectors side by side that a reduction may have
MOST_GATHERED = 2  # vectors whose lanes are put together one by one: that takes longer than the sums before it
VECTOR_CHOICES = 24  # choices between values along a vector, which lanes that are put together one by one repeat
TILE_ROWS = 14  # of a register tile
TILE_VECTORS = 8  # of a register tile
TILE_WIDE = 16  # vectors of a register tile whose rows have nothing in common
PASSES = (256, 512, 1024)  # elements of a long reduction in one pass
TILE_DOTS = 6  # outputs of a register tile along one axis, where lanes fold at the end
OUTPUT_CUTS = ((1, 4), (1, 2, 8), (1, 2, 8))  # parts of the rows, of the vector axis and of the first plain axis
WRITTEN_WINDOW = 7  # steps along a window that is written out, where nothing is multiplied
WHOLE_WINDOW = 16  # steps of a window over several axes that is written out
MOST_PLACES = 1 << 16  # places of a condition that are looked at one by one
