/* A new start after operations have failed (docs/failures.md): recover(). Ranks stand up to two operations
 * apart, since hooks let them send ahead, with words on their way; one of them fails, and the others learn
 * of it in a wait, before an operation, or when they have sent something more. membership.pml has the
 * operations themselves: here one is a word to each peer and a wait for the words of all.
 *
 * R ranks run OPS operations after each start. FAILURES times one of them fails, at any step, so that all
 * must recover; CRASHES ranks die at any step; HASTE times the patience of one that recovers ends with
 * another that lives: it is left behind, masked, and goes on until it notices. There is no time and no
 * fairness otherwise. A store to all peers is one step, but for the words.
 *
 * Checked: no word of before a start is taken for one of after; nobody is to go on with an operation that
 * it may have sent something of; nobody waits for ever.
 *
 * Taken out, to show that the model can fail:
 *   -DNO_MAXIMUM  go on two operations beyond those of the one who sees all come, not of all of them
 *   -DNO_ROUND    who has come to an earlier recovery counts as having come to this one
 *   -DNO_LEAVING  wait for those who have died, too
 *   -DNO_TOLD     a rank that goes on does not tell that it is done with all before
 */

#include "ranks.inc"

#ifndef FAILURES
#define FAILURES 1
#endif
#define VIEWS (3 * (FAILURES + CRASHES) + HASTE + R + 2)

/* The board: views, and how far each has come. */
byte decided = 1;
byte members[VIEWS];
byte round[VIEWS];         /* not 0: a recovery of this number must come first */
byte from[VIEWS];          /* the first operation after it */
byte come[R];              /* to which recovery */
byte its_next[R];          /* with which operation still to come */
bool done[R];              /* with everything, or told that it has been masked */

/* By receiver and sender. */
byte word[2 * R * R];      /* and parity: operation */
byte start[2 * R * R];     /* since which start its sender runs */
byte completed[R * R];

byte failures = FAILURES;

#define AT(receiver, sender) (op % 2 * R * R + (receiver) * R + (sender))
#define IS_IN(rank) ((members[g] >> (rank)) & 1)
#define IS_GONE(rank) (dead[rank] || done[rank])

/* What a rank waits for. */
#define ENTER 1
#define WORDS 2
#define READY(rank) ( \
  (phase == ENTER && completed[me * R + (rank)] + 2 >= op) || \
  (phase == WORDS && word[AT(me, rank)] == op))
#define READY_OR_OUT(rank) (!IS_IN(rank) || READY(rank))
#define IS_OF_NOW(rank) (!IS_IN(rank) || start[AT(me, rank)] == since)
#define IS_LOST(rank) (IS_IN(rank) && IS_GONE(rank) && !READY(rank))

/* Ends with the condition, or with a failure: seen, of the wait, or another. */
inline await(phase) {
  do
  :: atomic { ALL(READY_OR_OUT) -> break }
  :: decided != g -> goto recover
  :: atomic {
       decided == g && (failures > 0 || ANY(IS_LOST)) ->
       if
       :: ANY(IS_LOST) -> skip
       :: else -> failures--
       fi;
       members[g + 1] = members[g];
       round[g + 1] = g + 1;
       decided++
     }
  od
}

#ifdef NO_ROUND
#define HAS_COME(rank) (come[rank] != 0)
#else
#define HAS_COME(rank) (come[rank] == round[g])
#endif
#define HAS_COME_OR_OUT(rank) (!IS_IN(rank) || HAS_COME(rank))

/* Leaves behind who does not come. */
#ifdef NO_LEAVING
#define IS_MISSED(rank) (!IS_GONE(rank) && haste > 0)
#else
#define IS_MISSED(rank) (IS_GONE(rank) || haste > 0)
#endif
#define LEAVE(rank) \
  :: atomic { \
       decided == g && rank != me && IS_IN(rank) && !HAS_COME(rank) && IS_MISSED(rank) -> \
       if \
       :: IS_GONE(rank) -> skip \
       :: else -> haste-- \
       fi; \
       members[g + 1] = members[g] & ~(1 << rank); \
       round[g + 1] = round[g]; \
       decided++ \
     }

#ifdef NO_MAXIMUM
#define BEYOND(rank)
#else
#define BEYOND(rank) \
  if \
  :: IS_IN(rank) && its_next[rank] > first -> first = its_next[rank] \
  :: else -> skip \
  fi;
#endif

#define SEND(rank) \
  if \
  :: IS_IN(rank) -> word[AT(rank, me)] = op; start[AT(rank, me)] = since \
  :: else -> skip \
  fi
#define COMPLETE(rank) \
  if \
  :: IS_IN(rank) -> completed[(rank) * R + me] = op \
  :: else -> skip \
  fi;

proctype Rank(byte me) provided (!dead[me]) {
  byte g = 1;
  byte since = 1;    /* the view that it started with */
  byte op = 1;       /* the operation at hand, else the next to be sent */
  byte held = 0;     /* sent before it, and not yet received */
  byte later = 0;    /* sent after the one at hand */
  byte first = 1;    /* operation since the start */

next:
  do
  :: op < first + OPS && held < 2 ->
     await(ENTER);
     atomic { SEND(me) };
     atomic { SEND((me + 1) % R) };
#if R == 3
     atomic { SEND((me + 2) % R) };
#endif
     atomic { op++; held++ }
  :: atomic { held > 0 -> op = op - held; later = held - 1 };
     await(WORDS);
     atomic {
       assert(ALL(IS_OF_NOW));
       FOR_ALL(COMPLETE)
       op = op + later + 1;
       held = later;
       later = 0
     }
  :: decided != g -> goto recover
  :: op == first + OPS && held == 0 -> goto over
  od;

recover:
  /* Its next operation: the one at hand has begun. */
  atomic { op = op + later + 1; held = 0; later = 0 };
again:
  atomic { g = decided };
  if
  :: atomic { !IS_IN(me) -> goto over }
  :: atomic {
       IS_IN(me) && round[g] == 0 ->
       assert(from[g] > op);
       since = g;
       first = from[g];
       op = first - 1;
#ifndef NO_TOLD
       FOR_ALL(COMPLETE)
#endif
       op++
     };
     goto next
  :: atomic { IS_IN(me) && round[g] != 0 -> its_next[me] = op; come[me] = round[g] }
  fi;
  do
  :: decided != g -> goto again
  :: atomic {
       decided == g && ALL(HAS_COME_OR_OUT) ->
       first = op;
       FOR_ALL(BEYOND)
       members[g + 1] = members[g];
       round[g + 1] = 0;
       from[g + 1] = first + 2;
       decided++
     }
  FOR_ALL(LEAVE)
  od;
over:
  done[me] = true
}

init {
  byte i = 0;
  atomic {
    members[1] = EVERYBODY;
    do
    :: i < R -> run Rank(i); i++
    :: else -> break
    od;
    run Fate()
  };
  atomic {
    timeout ->  /* nobody can do anything more */
    assert(ALL(IS_GONE))
  }
}
