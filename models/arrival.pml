/* How a process becomes a rank of a job on several hosts (docs/failures.md, "Across hosts"): it asks at a
 * door, says hello to those who are there, is answered, knocks, is let in, and runs its first operations.
 * arrival_wire.inc has what comes to a process, arrival_rank.inc what it does itself.
 *
 * R ranks; NEW processes come, each to be a rank of its own, or with -DSUCCESSOR the last two the same one:
 * the second takes the place of the first once that has died, with HASTE at any time, if it can. Of
 * VICTIMS, a bit each, one may die at any step; rank 0 never does. Whoever lives is not given up. Rank 0
 * lets in who waits, LETS times, and begins its first operation after the first time. There is no time and
 * no fairness otherwise.
 *
 * A process is known to others by its token, here its number and 1. Between two of them messages arrive in
 * the order in which they were sent, or none of the last ones, if the sender has died; with -DROWS rows and words
 * of one that came later may be whole after what was sent behind them, or never. What is sent to all is a step.
 * Hellos, answers, and what makes decisions known otherwise are no part of that order. A decision comes about
 * at once, as council.pml allows; but between the look of rank 0 at who waits, and the decision, anything may
 * happen. What was sent to a process that has died may stay under way until the connection is closed.
 *
 * An operation sends a word to each peer (with -DROWS rows before it), and waits for the words of all, up to
 * HOOKS operations later. With STILL nobody begins any; who dies does so while it waits to be let in, and may be
 * missed at once if it is. How those agree who miss somebody in the midst of an operation is membership.pml's.
 *
 * Checked: words and rows that are taken for a rank's are those of the process that has been let in, of the
 * operation at hand; who finishes an operation and lives has had the words of the same processes that live;
 * who lives and has been let in is so still, and from an operation to come; nobody waits for ever: a process that
 * comes has come, or another is that rank; if it has come, all know that it waits; if it has been let in, it
 * runs all operations.
 *
 * Taken out, to show that the model can fail:
 *   -DNO_TOKENS     messages of any process that is, or was, that rank are taken
 *   -DNO_MET        send to a process before it has answered or said hello
 *   -DNO_BOOK       an answer does not say whom its sender knows
 *   -DNO_TURN       of those in it, say no hello to one whom the door has named
 *   -DNO_LOWEST     say hello to all at once, not to the lowest rank first
 *   -DNO_NEWEST     having been answered by all, do not hear first what they knew to be decided
 *   -DNO_MASK       take another process for a rank while that is a member
 *   -DNO_ACK        send the first operation before its addressee has told that it knows who takes part
 *   -DNO_LAST_LOOK  enter by the view that was adopted before the wait
 *   -DNO_REPEAT     after that look do not wait for those who are new in it
 *   -DNO_NEWS       who lets a process in does not tell so ahead of its next operation
 *   -DNO_MARGIN     let in one operation earlier
 *   -DNO_ORDER      what overtakes is not held back
 *   -DNO_LIFE       what was received in part from the process before counts when it is whole
 *   -DNO_SILENCE    rows of the process before may come when another takes its place
 *   -DNO_CLOSE      the connection to the process before is not closed
 */

#ifndef R
#define R 3
#endif
#ifndef NEW
#define NEW 1
#endif
#ifndef OPS
#define OPS 3
#endif
#ifndef HOOKS
#define HOOKS 1
#endif
#ifndef LETS
#define LETS NEW
#endif
#ifndef STILL
#define STILL 0
#endif
#ifndef HASTE
#define HASTE 0
#endif
#ifndef VICTIMS
#define VICTIMS 0
#endif

#ifdef SUCCESSOR
#define M (R - NEW + 1)
#else
#define M (R - NEW)
#endif
#define NP (M + NEW)          /* processes, ranks that are there first */
#define RANK(p) ((p) < R -> (p) : R - 1)
#define VIEWS (2 * NEW + 2)
#define LEN 12             /* more are never under way to one, which is checked */

/* By process. */
bool dead[NP];
byte known[NP];            /* the newest decision that it knows of */
byte view[NP];             /* the one that it has adopted */
byte sent[NP];             /* the last operation that it has begun */
byte got[NP];              /* and that it is done with */
byte answered[NP];         /* the newest decision that anybody knew of who has answered it */
bool is_there[NP];         /* all have answered it */
bool waits[NP];            /* to be let in */
bool done[NP];             /* with all operations */
byte result[NP * (OPS + 1)];  /* whose words it had, a bit each */

/* By process and rank: what the one knows of the other. */
#define AT(p, rank) ((p) * R + (rank))
byte token[NP * R];        /* whose messages are that rank's; 0: nobody's yet */
bool lost[NP * R];
bool met[NP * R];
byte heard_of[NP * R];     /* token of a process that is to be that rank, to which to say hello */
byte gate[NP * R];         /* operations up to this one are dropped */
byte acked[NP * R];
byte knocks[NP * R];       /* waits to be let in: behind this operation, and 1 more for 0 to mean no */
byte completed[NP * R];
byte word[2 * NP * R];     /* by parity: operation */
byte word_by[2 * NP * R];  /* and token */
#ifdef ROWS
byte row[2 * NP * R];
byte row_by[2 * NP * R];
byte leaving[2 * NP * R];  /* rows under way to that rank */
#endif

/* By sender and receiver. */
#define PAIR(from, to) ((from) * NP + (to))
chan wire[NP * NP] = [LEN] of { byte, byte };
bool gap[NP * NP];         /* a message is missing, and so all behind it */
bool hello[NP * NP];       /* said, until it is answered */
byte answer[NP * NP];      /* the book in it, and ANSWER */
#ifdef ROWS
byte aside[NP * NP];       /* operation whose rows, or with WORD_ASIDE whose word, have come in part */
#endif

/* What is decided. */
byte decided = 0;
byte members[VIEWS];
byte from[VIEWS * R];
byte who[VIEWS * R];       /* the process that is meant */

byte crashes = (VICTIMS != 0);
byte lets = LETS;          /* that rank 0 may still let in */
byte next_guest = M;       /* the process that asks at a door next */

#define SHUT 255
#define ANSWER 128
#define WORD_ASIDE 128

/* Messages. */
#define STANDING 1         /* the view that is adopted, and 16 times knocks */
#define NEWS 2
#define ROWS_OF 3
#define WORD_OF 4
#define COMPLETED 5

#define HAS(set, i) (((set) >> (i)) & 1)
#define ME RANK(p)
#define IS_TAKEN(p, q) (token[AT(p, RANK(q))] == (q) + 1)
#define IS_CONNECTED(p, q) (IS_TAKEN(p, q) && !lost[AT(p, RANK(q))])
#ifdef NO_TURN
#define IS_KNOWN(p, q) IS_CONNECTED(p, q)
#else
#define IS_KNOWN(p, q) (IS_CONNECTED(p, q) && met[AT(p, RANK(q))])
#endif
#define HAS_MET(p, rank) (met[AT(p, rank)] && !lost[AT(p, rank)])
#ifdef NO_MET
#define MAY_SEND(p, rank) (token[AT(p, rank)] != 0 && !lost[AT(p, rank)])
#else
#define MAY_SEND(p, rank) HAS_MET(p, rank)
#endif

#if NP == 3
#define ANY_PROCESS(condition) (condition(0) || condition(1) || condition(2))
#else
#define ANY_PROCESS(condition) (condition(0) || condition(1) || condition(2) || condition(3))
#endif
#if R == 2
#define ALL(condition) (condition(0) && condition(1))
#define FOR_ALL(action) action(0) action(1)
#else
#define ALL(condition) (condition(0) && condition(1) && condition(2))
#define FOR_ALL(action) action(0) action(1) action(2)
#endif

#include "arrival_wire.inc"
#include "arrival_rank.inc"

#define MAY_DIE(p) \
  (HAS(VICTIMS, p) && (p) < next_guest && !dead[p] && (!STILL || waits[p]))

proctype Fate() {
  do
  :: crashes > 0 ->
     atomic {
       if
       :: MAY_DIE(0) -> dead[0] = true
       :: MAY_DIE(1) -> dead[1] = true
       :: MAY_DIE(2) -> dead[2] = true
#if NP == 4
       :: MAY_DIE(3) -> dead[3] = true
#endif
       fi;
       crashes--
     }
  :: break
  od
}

/* Another process is the same rank; or nobody has let it in, or missed the one before, to the end. */
#define IS_INSTEAD(z) ((z) != p && RANK(z) == ME && !dead[z] && is_there[z])
#define HAS_ENDED(rank) ((rank) >= M || dead[rank] || done[rank])
#define HAS_HEARD(rank) ((rank) >= M || dead[rank] || knocks[AT(rank, ME)] != 0)
#define IS_OVER(p) \
  (dead[p] || done[p] || ANY_PROCESS(IS_INSTEAD) || \
   (ALL(HAS_ENDED) && \
    ((waits[p] && known[p] == decided && !HAS(members[decided], ME) && ALL(HAS_HEARD)) || \
     (!is_there[p] && HAS(members[decided], ME) && dead[who[decided * R + ME]]))))
#define DIFFERS(a, b) \
  (!dead[a] && !dead[b] && result[(a) * (OPS + 1) + op] != 0 && result[(b) * (OPS + 1) + op] != 0 && \
   ((result[(a) * (OPS + 1) + op] ^ result[(b) * (OPS + 1) + op]) & ALIVE) != 0)
#define LIVES(p) (!dead[p]) << (p)
#if NP == 3
#define ALIVE (LIVES(0) | LIVES(1) | LIVES(2))
#else
#define ALIVE (LIVES(0) | LIVES(1) | LIVES(2) | LIVES(3))
#endif

init {
  byte p = 0;
  byte q = 0;
  byte op = 1;
  atomic {
    do
    :: p < NP ->
       q = 0;
       do
       :: q < R ->
          lost[AT(p, q)] = p >= M || q >= M;
          if
          :: p < M && q < M && p != q -> token[AT(p, q)] = q + 1; met[AT(p, q)] = true
          :: else -> skip
          fi;
          gate[AT(p, q)] = (q < M -> 0 : SHUT);
          q++
       :: else -> q = 0; break
       od;
       if
       :: p < M -> members[0] = members[0] | 1 << p; is_there[p] = true
       :: else -> skip
       fi;
       if
       :: p < R -> from[p] = 1; who[p] = p
       :: else -> skip
       fi;
       run Rank(p);
       do
       :: q < NP ->
          if
          :: p != q && RANK(p) != RANK(q) -> run Wire(q, p)
          :: else -> skip
          fi;
          q++
       :: else -> q = 0; break
       od;
       p++
    :: else -> p = 0; break
    od;
    run Fate()
  };
  atomic {
    timeout ->  /* nobody can do anything more */
    do
    :: p < NP -> assert(IS_OVER(p)); p++
    :: else -> break
    od;
    do
    :: op <= OPS ->
       assert(!DIFFERS(0, 1) && !DIFFERS(0, 2) && !DIFFERS(1, 2));
#if NP == 4
       assert(!DIFFERS(0, 3) && !DIFFERS(1, 3) && !DIFFERS(2, 3));
#endif
       op++
    :: else -> break
    od
  }
}
