/* Who takes part (docs/failures.md): ranks that crash, ranks that are given up though they would have
 * come, ranks that are let in, and the plan that those who go on must agree on. recovery.pml has the
 * new start after a failure; protocol.pml, which has no failures, the rest.
 *
 * R ranks run OPS operations, of the kinds in KINDS: packed dispatches, combines, and slotted dispatches
 * with hooks, whose receive phase is held back or not. CRASHES of them die, anywhere between two steps;
 * HASTE times a rank's patience ends with one that lives: the late rank then goes on at any time.
 * UNMASKS times one that waits to be let in is, by any active rank between two operations: one that has
 * been masked, or with -DJOIN the last rank, which is not there from the beginning. There is no time and
 * no fairness otherwise.
 *
 * Every store to a peer and every load that the code bases a decision on is a step (with -DCOARSE all
 * stores of one kind to all peers are one step); only a store to the board that follows its load
 * without anything between is taken together with it, and a view with the decision for it (membership.h:
 * a cell is not reused while it is read; membership_test.cc). Rows are stored to ranks that take part
 * from a later operation on, too: nobody reads them.
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
 *   -DNO_MARGIN     let a rank in one operation earlier than the next but two
 *   -DNO_ENTRY_LOOK begin an operation without looking who has been let in for it
 *   -DNO_HOOK_LOOK  run a hook without looking who has been let in
 *   -DNO_KNOCK      let a rank in for an operation that it may have sent something of
 *   -DNO_TOLD       a rank that is let in does not tell what it is done with
 */

#include "ranks.inc"

#ifndef UNMASKS
#define UNMASKS 0
#endif
#ifdef JOIN
#define FIRST_MEMBERS (EVERYBODY & ~(1 << (R - 1)))
#define MAY_LET_IN (me == 0)   /* the other member is like it */
#else
#define FIRST_MEMBERS EVERYBODY
#define MAY_LET_IN true
#endif

#define PACKED 1
#define COMBINE 2
#define SLOTTED 4
#ifndef KINDS
#define KINDS (PACKED | COMBINE)
#endif

#define NOBODY 255
#define VIEWS (CRASHES + HASTE + UNMASKS + 2)

/* The board. */
byte decided = 1;          /* generation of the newest view */
byte members[VIEWS];       /* views: who takes part, a bit each */
byte from[VIEWS * R];      /* views: the first operation of each rank that takes part */
byte knocks[R];            /* waits to be let in: its next operation, and 1 more for 0 to mean no */
byte acked[R];
byte finished[2 * R];      /* by parity: epoch and plan of the last dispatch that a rank finished */
byte finished_plan[2 * R];
bool writing[R];
bool done[R];              /* with all operations, or told that it has been masked */

/* Words and rows of each block, by parity, owner and source. */
#define AT(owner, source) ((op % 2) * R * R + (owner) * R + (source))
byte header[2 * R * R];
byte counts[2 * R * R];
byte arrived[2 * R * R];
byte arrived_plan[2 * R * R];
byte row[2 * R * R];       /* epoch of the row; 0 once another plan's rows lie over it */
byte row_plan[2 * R * R];
byte landed[2 * R * R];    /* slotted rows: epoch */
byte completed[R * R];     /* by owner and source */
byte outputs[R];           /* combine region: epoch of its rows */
byte result[(OPS + 1) * R];/* sources that counted in a dispatch that succeeded */

byte kind[OPS + 1];        /* chosen by whoever comes first */
byte unmasks = UNMASKS;

#define IS_IN(view, rank) (((view) >> (rank)) & 1)
#if UNMASKS > 0
#define TAKES_PART(view, rank) (IS_IN(members[view], rank) && op >= from[(view) * R + (rank)])
#else
#define TAKES_PART(view, rank) IS_IN(members[view], rank)
#endif
#if R == 2
#define PARTICIPANTS(view) (TAKES_PART(view, 0) | TAKES_PART(view, 1) << 1)
#else
#define PARTICIPANTS(view) \
  (TAKES_PART(view, 0) | TAKES_PART(view, 1) << 1 | TAKES_PART(view, 2) << 2)
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
  (phase == ROWS && arrived[AT(me, rank)] == op && arrived_plan[AT(me, rank)] == written) || \
  (phase == REUSE && completed[me * R + rank] >= last_use))

#define READY_OR_OUT(rank) (!TAKES_PART(g, rank) || READY(rank))
#define SILENT(rank) (!IS_IN(lost, rank) || !writing[rank] || dead[rank])

/* Gives up on a rank that is dead, or is thought to be; if another view has been decided meanwhile, the
 * proposal fails and that is looked at. */
#define GIVE_UP(rank) \
  :: atomic { \
       decided == g && rank != me && TAKES_PART(g, rank) && !READY(rank) && \
       (dead[rank] || haste > 0) -> \
       if \
       :: dead[rank] -> skip \
       :: else -> haste-- \
       fi; \
       members[decided + 1] = members[g] & ~(1 << rank); \
       KEEP_FROM; \
       decided++ \
     }

/* The first operations of the next view are those of this one. */
#define KEEP(rank) from[(decided + 1) * R + (rank)] = from[decided * R + (rank)]
#if UNMASKS == 0
#define KEEP_FROM skip
#elif R == 2
#define KEEP_FROM KEEP(0); KEEP(1)
#else
#define KEEP_FROM KEEP(0); KEEP(1); KEEP(2)
#endif

/* Masks a rank by a call, between operations. */
#define LEAVE_OUT(rank) \
  :: atomic { \
       haste > 0 && decided == g && rank != me && IS_IN(members[g], rank) -> \
       haste--; \
       members[decided + 1] = members[g] & ~(1 << rank); \
       KEEP_FROM; \
       decided++ \
     }; \
     adopt()

/* Lets in whoever waits for it. Others may have begun the operation after the next, with a hook, and the
 * one behind that needs this rank; and the other rank may have sent something of its own next but one. */
#ifdef NO_MARGIN
#define MARGIN 1
#else
#define MARGIN 2
#endif
#ifdef NO_KNOCK
#define BEYOND(rank) (op + MARGIN)
#else
#define BEYOND(rank) (knocks[rank] > op + MARGIN -> knocks[rank] : op + MARGIN)
#endif
#define LET_IN(rank) \
  :: atomic { \
       unmasks > 0 && MAY_LET_IN && decided == g && !IS_IN(members[g], rank) && knocks[rank] != 0 && \
       !dead[rank] -> \
       unmasks--; \
       members[decided + 1] = members[g] | (1 << rank); \
       KEEP_FROM; \
       from[(decided + 1) * R + (rank)] = BEYOND(rank); \
       decided++ \
     }; \
     adopt()

/* Adopts the newest view. Whoever is not in it is told so by an error, and may wait to be let in. */
inline adopt() {
  atomic {
    lost = members[g];
    g = decided;
    lost = lost & ~members[g];
    acked[me] = g
  };
  if
  :: atomic { !IS_IN(members[g], me) -> goto out }
#ifdef NO_SILENCE
  :: else -> skip
#else
  :: atomic { IS_IN(members[g], me) && ALL(SILENT) -> lost = 0 }
#endif
  fi
}

/* Looks for another view. */
inline look() {
  if
  :: decided != g -> adopt()
  :: decided == g -> skip
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
#elif defined(COARSE)
#define TO_ALL(store, last) \
  atomic { ONE(store, me); ONE(store, PEER1); ONE(store, PEER2); last }
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
  :: IS_IN(sources, rank) && arrived[AT(me, rank)] == op && \
     arrived_plan[AT(me, rank)] == written -> \
     assert((written == 0 && landed[AT(me, rank)] == op) || \
            (written != 0 && row[AT(me, rank)] == op && row_plan[AT(me, rank)] == plan)) \
  :: else -> skip \
  fi;

proctype Rank(byte me) provided (!dead[me]) {
  byte g = 1;              /* the view that it has adopted */
  byte op = 1;             /* the operation at hand, else the next to be sent */
  byte held = 0;           /* hooks that have not run: of the operations before it */
  byte later = 0;          /* operations sent after the one at hand, whose hook runs */
  byte lost = 0;
  byte p = 0;
  byte plan = 0;           /* of the dispatch at hand: by the view of this generation */
  byte sources = 0;
  byte witness = NOBODY;   /* who has finished by that plan */
  byte written = 0;        /* plan by which its own rows lie; 0 for slotted ones, which stay */
  byte settled = 1;        /* all are known to have adopted this view before they could finish */
  byte settled_from = 1;   /* this epoch */
  byte last_use = 0;       /* of its combine region */
  bool torn = false;       /* a combine has read what is not of this operation */

#ifdef JOIN
  if
  :: me == R - 1 -> goto out
  :: else -> skip
  fi;
#endif
next:
  do
#if UNMASKS > 0
  FOR_ALL(LET_IN)
  FOR_ALL(LEAVE_OUT)
#endif
  :: atomic { op <= OPS && kind[op] == 0 ->
       if
       :: KINDS & PACKED -> kind[op] = PACKED
       :: KINDS & COMBINE -> kind[op] = COMBINE
       :: KINDS & SLOTTED -> kind[op] = SLOTTED
       fi
     }
  :: atomic { held > 0 -> op = op - held; later = held - 1 };  /* runs a hook */
#ifndef NO_HOOK_LOOK
     look();
#endif
     goto replan
  :: op <= OPS && kind[op] != 0 && held < 2 && (held == 0 || kind[op] == SLOTTED) ->
     if
     :: op > 2 ->
        await(ENTER);
#ifndef NO_ENTRY_LOOK
        look()
#endif
     :: else -> skip
     fi;
     if
     :: kind[op] == COMBINE ->
        await(REUSE);
        atomic { outputs[me] = op; last_use = op };
        TO_ALL(header[AT(p, me)] = op, skip);
        await(HEADERS);
        TO_ALL(torn = torn || (TAKES_PART(g, p) && outputs[p] != op), skip);
#ifndef NO_LAST_LOOK
        look();
#endif
        atomic { assert(!torn); torn = false }

     :: kind[op] == SLOTTED ->
        TO_ALL(header[AT(p, me)] = op; counts[AT(p, me)] = op, skip);
land:   writing[me] = true;
        if
        :: atomic { decided != g -> writing[me] = false };
           adopt();
           goto land
        :: decided == g -> skip
        fi;
        TO_ALL(landed[AT(p, me)] = op, skip);
        writing[me] = false;
        TO_ALL(arrived[AT(p, me)] = op; arrived_plan[AT(p, me)] = 0, op++; held++);
        goto next

     :: kind[op] == PACKED ->
        TO_ALL(header[AT(p, me)] = op; counts[AT(p, me)] = op, skip);
replan: await(HEADERS);

        /* agree_on_plan */
        if
        :: atomic {
             settled == g && op >= settled_from ->
             plan = g;
             sources = PARTICIPANTS(g)
           }
        :: else ->
#ifndef NO_ACK
           await_or(AGREED, replan);
#endif
           atomic {
             plan = g;
             sources = PARTICIPANTS(g);
             settled = g;
             settled_from = op + later + 1
           };
#ifndef NO_FINISHED
           TO_ALL(
             if
             :: acked[p] < g -> settled = 0
             :: else -> skip
             fi;
             if
             :: finished[(op % 2) * R + p] == op && finished_plan[(op % 2) * R + p] != g ->
                plan = finished_plan[(op % 2) * R + p];
                sources = PARTICIPANTS(plan);
                witness = p
             :: else -> skip
             fi, skip);
#endif
        fi;
        atomic { FOR_ALL(COPIES) witness = NOBODY };

        /* write_rows, publish_arrived */
        if
        :: written == plan || kind[op] == SLOTTED -> skip
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
     TO_ALL(completed[p * R + me] = op,
            op = op + later + 1; held = later; later = 0; written = 0; plan = 0; sources = 0)
  :: op > OPS && held == 0 -> break
  od;
  goto over;
out:
#if UNMASKS > 0
  /* recover: waits to be let in, with nothing in hand; or for ever. What it finished may have been
   * finished without it by the others. */
  atomic {
    do
    :: p <= OPS -> result[p * R + me] = 0; p++
    :: else -> break
    od;
    p = 0;
    knocks[me] = op + later + 2;
    held = 0; later = 0; lost = 0; written = 0; plan = 0; sources = 0; last_use = 0; torn = false
  };
  atomic {
    IS_IN(members[decided], me) && from[decided * R + me] >= knocks[me] ->
    g = decided;
    acked[me] = g;
    op = from[g * R + me];
    knocks[me] = 0
  };
#ifndef NO_TOLD
  TO_ALL(completed[p * R + me] = op - 1, skip);
#endif
  goto next;
#endif
over:
  done[me] = true
}

#define IS_OVER(rank) \
  (dead[rank] || done[rank] || (knocks[rank] != 0 && !IS_IN(members[decided], rank)))
#define STAYS(rank) (!dead[rank] && IS_IN(members[decided], rank) && result[i * R + rank] != 0)
#define AGREES(a, b) \
  assert(!STAYS(a) || !STAYS(b) || result[i * R + a] == result[i * R + b])

init {
  byte i = 0;
  atomic {
    members[1] = FIRST_MEMBERS;
#if KINDS == PACKED || KINDS == COMBINE || KINDS == SLOTTED
    do
    :: i < OPS -> i++; kind[i] = KINDS
    :: else -> i = 0; break
    od;
#endif
    do
    :: i < R -> acked[i] = 1; from[R + i] = 1; run Rank(i); i++
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
