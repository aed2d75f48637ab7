"""The numbers that the search is by, whatever the machine, each with what it is and where it comes from."""

# What predictions of a kernel by itself do not see: chosen by hand.

# Of the time that an intermediate takes to main memory and back: a line that it pushes out of the caches is mostly
# one that would have been read again, a weight at the next call at the latest.
DISPLACED = 0.4
CHEAP = 4  # operations that may be repeated in several consumers
CHEAP_ON_GPU = 32  # the same on a GPU, of what is read from memory: arithmetic is idle there, and room is not
CHEAP_COMPOSED = 8  # the same with all that is composed into the map: chains repeat what every link before repeats
UNHURRIED = 4  # times as long as the tile level takes to fill: so slowly nothing else is disturbed

# Margins: what is predicted to gain less is taken for the model's error, or for not worth its complication.

# Joining a contraction over weights gives up its own best tile; a smaller gain than this is within the model's error.
JOIN_GAIN = 0.035
MOST_LOSS = 1.02  # times as long as its parts: a join that loses more is not made up for by those that follow
READ_ONCE = 1.01  # reads of an element that count as one: a padded block reads a few twice
SEVERAL_SOURCES = 1.5  # reads of an element up to which its reader may choose where it comes from
# Of the time with everything resident, what must be left without its intermediates' traffic for a stream to be looked
# at: that traffic and room are all a stream saves, and carrying its states along costs something.
STREAM_PAYS = 0.95
INNER_WORTH = 0.997  # of the kernel's time with one tile
SLACK = 0.05  # of an objective's best, that those after it may cost
ALIKE_WORTH = 1.05  # times as long a kernel by itself may take that reads constants as another plan has them
CONFLICT = 2.0  # times its best of all: an objective that cannot have less is in conflict with those before it
REFINED = 0.995  # of the kernel's time with the leaf it had
LEAST_GAIN = 50e-9  # seconds: predictions are told to a tenth of a microsecond
ALIKE_STAGES = 1e-3  # bounds on the slowest stage that differ by less than this part of it are looked at as one
LITTLE_LAYER = 1 / 8  # of a layer: so much more of one is added where less passes behind it
LARGE_LAYER = 1 / 2  # of what a rank has on average: layers above it may be shared out to all ranks
EVEN_STAGES = 1.05  # times its share that a stage may hold: to hold less is not worth any time
LESS_EVEN = 1.25  # times as much is what a rank may hold next where stages that hold so much will not do
TWO_STAGES = 1.05  # times the seconds of a rank with several stages that one with a single stage may take
STAGES_WORTH = 1.5  # times the seconds of other stages from which on these are told of beside those that hold no more
SOLVED_GAP = 1e-4  # of the optimum of an integer program, within which a solution is taken for one
PASS_GAIN = 1e-3  # the part of the seconds that a pass over all mesh axes has to save for another one
WEIGHTS_SLACK = 1.02  # times its share of the weights that a rank may have: what is small beside them is not cut
WEIGHTS_NOTHING = 0.0005  # the part of all weights below which those of a compute do not count
WEIGHTS_SMALL = 0.005  # the part of all weights that a section has without being asked to share them out
HALVED = 0.9  # of what a part holds: a dimension whose cut in two leaves more is none that parts are made along

# How much is looked at: what bounds the time that planning takes.
MOST_NESTS = 48  # nests of a kernel, of maps and plain reductions
MOST_WITH_PRODUCTS = 16  # nests of a kernel with products: each gives up a tile of its own
MOST_SIBLINGS = 3  # other readers of a result that are joined with it all at once
KEPT = 2  # partitions of the nests looked at so far
LARGEST_VALUE = 150  # expression nodes a composed map may reach
LARGEST_COMPOSED = 300  # with all that is composed into it: longer chains of maps are several kernels
LONGEST_EPILOGUE = 16  # maps looked at behind one reduction
STREAM_BLOCKS = (32, 64, 128, 256)  # elements of a streamed axis
INNER_NESTS = 3  # nests that are tiled again at least
NEARBY = 16  # kernels farther apart would keep what one of them makes in memory for long
OBJECTIVE_PLANS = 8  # plans by objectives that are looked at, the quickest one among them
# Of what is alive at most, the part above which moments are looked at together, and whether they share what may be paid
HOT = ((0.95, True), (0.95, False), (0.8, True), (0.8, False), (0.65, True))
SMALLER = 0.25  # of the tile level, where more and smaller tiles are wanted
MOST_REFINED = 24  # kernels that differ and are refined, those that take most time first
POLICY_PLANS = 8  # plans of a kernel by policies, its own among them
LEAST_SHARE = 0.005  # of the model's time that all kernels like one must take
JUST_BEFORE = 2  # kernels before a Scan that may bring its weights near: not more than what they bring stays
