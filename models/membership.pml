/* Who takes part (docs/failures.md): ranks that crash, ranks that are given up though they would have
 * come, and the plan that those who go on must agree on. Packed dispatches and combines, without hooks,
 * and nobody is let in: slotted rows lie by source and are moved by no plan; protocol.pml, which has no
 * failures, has the rest.
 *
 * R ranks run OPS operations of either kind. CRASHES of them die, anywhere between two steps;
 * HASTE times a rank's patience ends with one that lives: the late rank then goes on at any time. There
 * is no time and no fairness otherwise.
 *
 * Every store to a peer and every load that the code bases a decision on is a step; only a store to the
 * board that follows its load without anything between is taken together with it, and a view with the
 * decision for it (membership.h: a cell is not reused while it is read; membership_test.cc).
 *
 * A row is a cell per (owner, source) that knows the epoch and the plan by which it was written; writing
 * by one plan spoils what lies there by another, since every place may have moved.
 *
 * Checked: all who finish a dispatch and stay have counted the same sources; no row is read, nor lies in
 * a finished view, that was not written for that operation and plan; no count is missing; nobody waits
 * for ever.
 *
 * Taken out, to show that the model can fail:
 *   -DNO_ACK        plan without waiting until all have adopted the view or finished
 *   -DNO_FINISHED   plan without looking at who has finished by an earlier view
 *   -DNO_SILENCE    do not wait for a masked rank that may be writing
 *   -DNO_BRACKET    write rows without looking at the view once the flag is up
 *   -DNO_LAST_LOOK  end a combine without looking whether this rank has been masked
 */

#ifndef R
#define R 3
#endif
#ifndef OPS
#define OPS 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef HASTE
#define HASTE 1
#endif

#define PACKED 1
#define COMBINE 2

#define EVERYBODY ((1 << R) - 1)
#define NOBODY 255
#define VIEWS (CRASHES + HASTE + 2)

/* The board. */
byte decided = 1;          /* generation of the newest view */
byte members[VIEWS];       /* views: who takes part, a bit each */
byte acked[R];
byte finished[2 * R];      /* by parity: epoch and plan of the last dispatch that a rank finished */
byte finished_plan[2 * R];
bool writing[R];
bool dead[R];
bool done[R];              /* with all operations, or told that it has been masked */

/* Words and rows of each block, by parity, owner and source. */
#define AT(owner, source) ((op % 2) * R * R + (owner) * R + (source))
byte header[2 * R * R];
byte counts[2 * R * R];
byte arrived[2 * R * R];
byte arrived_plan[2 * R * R];
byte row[2 * R * R];       /* epoch of the row; 0 once another plan's rows lie over it */
byte row_plan[2 * R * R];
byte completed[R * R];     /* by owner and source */
byte outputs[R];           /* combine region: epoch of its rows */
byte result[(OPS + 1) * R];/* sources that counted in a dispatch that succeeded */

byte kind[OPS + 1];        /* chosen by whoever comes first */
byte crashes = CRASHES;
byte haste = HASTE;

#define IS_IN(view, rank) (((view) >> (rank)) & 1)
#if R == 2
#define ALL(condition) (condition(0) && condition(1))
#define FOR_ALL(action) action(0) action(1)
#else
#define ALL(condition) (condition(0) && condition(1) && condition(2))
#define FOR_ALL(action) action(0) action(1) action(2)
#endif

/* What a rank waits for. */
#define ENTER 1
#define HEADERS 2
#define AGREED 3
#define ROWS 4
#define REUSE 5
#define READY(rank) ( \
  (phase == ENTER && completed[me * R + rank] + 2 >= op) || \
  (phase == HEADERS && header[AT(me, rank)] == op) || \
  (phase == AGREED && (acked[rank] >= g || finished[(op % 2) * R + rank] == op)) || \
  (phase == ROWS && arrived[AT(me, rank)] == op && arrived_plan[AT(me, rank)] == plan) || \
  (phase == REUSE && completed[me * R + rank] >= last_use))

#define READY_OR_OUT(rank) (!IS_IN(members[g], rank) || READY(rank))
#define SILENT(rank) (!IS_IN(lost, rank) || !writing[rank] || dead[rank])

/* Gives up on a rank that is dead, or is thought to be; if another view has been decided meanwhile, the
 * proposal fails and that is looked at. */
#define GIVE_UP(rank) \
  :: atomic { \
       decided == g && rank != me && IS_IN(members[g], rank) && !READY(rank) && \
       (dead[rank] || haste > 0) -> \
       if \
       :: dead[rank] -> skip \
       :: else -> haste-- \
       fi; \
       members[decided + 1] = members[g] & ~(1 << rank); \
       decided++ \
     }

/* Adopts the newest view. Whoever is not in it is told so by an error, and does nothing more. */
inline adopt() {
  atomic {
        lost = members[g];
    g = decided;
    lost = lost & ~members[g];
    acked[me] = g
  };
  if
  :: atomic { !IS_IN(members[g], me) -> goto over }
#ifdef NO_SILENCE
  :: else -> skip
#else
  :: atomic { IS_IN(members[g], me) && ALL(SILENT) -> lost = 0 }
#endif
  fi
}

/* Waits until all who take part are ready in this phase (a constant). */
inline await(phase) {
  do
  :: atomic { ALL(READY_OR_OUT) -> break }
  :: decided != g -> adopt()
  FOR_ALL(GIVE_UP)
  od
}

/* The same, but goes to `otherwise` after another view has been adopted. */
inline await_or(phase, otherwise) {
  do
  :: atomic { ALL(READY_OR_OUT) -> break }
  :: decided != g -> adopt(); goto otherwise
  FOR_ALL(GIVE_UP)
  od
}

/* Runs `store`, of rank `p`, for itself and all who take part, a step each; with the first it also does
 * what nobody else sees. */
#define PEER1 ((me + 1) % R)
#define PEER2 ((me + 2) % R)
#define ONE(store, peer) \
  p = peer; \
  if \
  :: IS_IN(members[g], p) -> store \
  :: else -> skip \
  fi; \
  p = 0
#if R == 2
#define TO_ALL(store, last) atomic { ONE(store, me); ONE(store, PEER1); last }
#else
#define TO_ALL(store, last) \
  atomic { ONE(store, me); ONE(store, PEER1) }; \
  atomic { ONE(store, PEER2); last }
#endif

/* Rows by another plan, of this epoch, that lie where `p` keeps its rows are spoilt. */
#define SPOIL(source) \
  if \
  :: source != me && row[AT(p, source)] == op && row_plan[AT(p, source)] != plan -> \
     row[AT(p, source)] = 0 \
  :: else -> skip \
  fi;

/* Counts of a source that was lost before they came here are copied from who has finished by this plan. */
#define COPIES(rank) \
  if \
  :: IS_IN(sources, rank) && header[AT(me, rank)] != op -> \
     assert(witness != NOBODY && counts[AT(witness, rank)] == op); \
     counts[AT(me, rank)] = op \
  :: else -> skip \
  fi;

/* Rows of a source that was lost before it had written all of them are zeros. */
#define READS(rank) \
  if \
  :: IS_IN(sources, rank) && arrived[AT(me, rank)] == op && arrived_plan[AT(me, rank)] == plan -> \
     assert(row[AT(me, rank)] == op && row_plan[AT(me, rank)] == plan) \
  :: else -> skip \
  fi;

proctype Rank(byte me) provided (!dead[me]) {
  byte g = 1;              /* the view that it has adopted */
  byte op = 1;
  byte lost = 0;
  byte p = 0;
  byte plan = 0;           /* of the dispatch at hand: by the view of this generation */
  byte sources = 0;
  byte witness = NOBODY;   /* who has finished by that plan */
  byte written = 0;        /* plan by which its own rows lie */
  byte settled = 1;        /* all are known to have adopted this view before they could finish */
  byte settled_from = 1;   /* this epoch */
  byte last_use = 0;       /* of its combine region */
  bool torn = false;       /* a combine has read what is not of this operation */

  do
  :: op <= OPS ->
     if
     :: op > 2 -> await(ENTER)
     :: else -> skip
     fi;
     atomic {
       if
       :: kind[op] == 0 ->
          if
          :: kind[op] = PACKED
          :: kind[op] = COMBINE
          fi
       :: else -> skip
       fi
     };
     if
     :: kind[op] == COMBINE ->
        await(REUSE);
        atomic { outputs[me] = op; last_use = op };
        TO_ALL(header[AT(p, me)] = op, skip);
        await(HEADERS);
        TO_ALL(torn = torn || outputs[p] != op, skip);
#ifndef NO_LAST_LOOK
        if
        :: decided != g -> adopt()
        :: decided == g -> skip
        fi;
#endif
        atomic { assert(!torn); torn = false }

     :: else ->
        TO_ALL(header[AT(p, me)] = op; counts[AT(p, me)] = op, skip);
replan: await(HEADERS);

        /* agree_on_plan */
        if
        :: atomic {
             settled == g && op >= settled_from ->
             plan = g;
             sources = members[g]
           }
        :: else ->
#ifndef NO_ACK
           await_or(AGREED, replan);
#endif
           atomic { plan = g; sources = members[g]; settled = g; settled_from = op + 1 };
#ifndef NO_FINISHED
           TO_ALL(
             if
             :: acked[p] < g -> settled = 0
             :: else -> skip
             fi;
             if
             :: finished[(op % 2) * R + p] == op && finished_plan[(op % 2) * R + p] != g ->
                plan = finished_plan[(op % 2) * R + p];
                sources = members[plan];
                witness = p
             :: else -> skip
             fi, skip);
#endif
        fi;
        atomic { FOR_ALL(COPIES) witness = NOBODY };

        /* write_rows, publish_arrived */
        if
        :: written == plan -> skip
        :: else ->
           writing[me] = true;
#ifndef NO_BRACKET
           if
           :: atomic { decided != g -> writing[me] = false; plan = 0; sources = 0 };
              adopt();
              goto replan
           :: decided == g -> skip
           fi;
#endif
           TO_ALL(
             assert(finished[(op % 2) * R + p] != op || finished_plan[(op % 2) * R + p] == plan);
             FOR_ALL(SPOIL)
             row[AT(p, me)] = op;
             row_plan[AT(p, me)] = plan, skip);
           atomic { writing[me] = false; written = plan };
           TO_ALL(arrived[AT(p, me)] = op; arrived_plan[AT(p, me)] = plan, skip)
        fi;
        await_or(ROWS, replan);
        atomic {
          FOR_ALL(READS)
          result[op * R + me] = sources;
          finished[(op % 2) * R + me] = op;
          finished_plan[(op % 2) * R + me] = plan
        }
     fi;
     TO_ALL(completed[p * R + me] = op, op++; written = 0; plan = 0; sources = 0)
  :: else -> break
  od;
over:
  done[me] = true
}

proctype Fate() {
  do
  :: crashes > 0 ->
     atomic {
       if
       :: !dead[0] -> dead[0] = true
       :: !dead[1] -> dead[1] = true
#if R == 3
       :: !dead[2] -> dead[2] = true
#endif
       fi;
       crashes--
     }
  :: break
  od
}

#define IS_OVER(rank) (dead[rank] || done[rank])
#define STAYS(rank) (!dead[rank] && IS_IN(members[decided], rank) && result[i * R + rank] != 0)
#define AGREES(a, b) \
  assert(!STAYS(a) || !STAYS(b) || result[i * R + a] == result[i * R + b])

init {
  byte i = 0;
  atomic {
    members[1] = EVERYBODY;
    do
    :: i < R -> acked[i] = 1; run Rank(i); i++
    :: else -> break
    od;
    run Fate()
  };
  atomic {
    timeout ->  /* nobody can do anything more */
    assert(ALL(IS_OVER));
    i = 1;
    do
    :: i <= OPS ->
       AGREES(0, 1);
#if R == 3
       AGREES(0, 2);
       AGREES(1, 2);
#endif
       i++
    :: else -> break
    od
  }
}
