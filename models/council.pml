/* How ranks that share no memory make one decision (src/runtime/council.h, docs/failures.md): R ranks, of which
 * any propose, in OPS ballots; ballot b is of rank b % R. A letter that has been sent may be read by its
 * addressee at any time later, or never: so letters are lost, late and out of order, ranks die and are cut
 * off. There is no time and no fairness.
 *
 * Every letter read, with what its reader does about it, is a step; so is the beginning of a ballot. The
 * decisions after this one have other members, and nothing in common with it but those: a letter names the
 * decision that it is about.
 *
 * Checked: what is decided in two ballots is the same.
 *
 * Taken out, to show that the model can fail:
 *   -DNO_KEEP     who proposes does not keep what somebody has accepted before
 *   -DNO_PROMISE  who has promised a later ballot accepts in an earlier one
 *   -DNO_LOWEST   any half of the ranks are enough
 */

#ifndef R
#define R 3
#endif
#ifndef OPS
#define OPS 3
#endif

/* By ballot, from 1 on. */
bool begun[OPS + 1];
byte heard[OPS + 1];        /* ranks whose promise the proposer has read, a bit each */
byte kept_in[OPS + 1];      /* the newest ballot that these had accepted in */
byte kept[OPS + 1];         /* and what */
byte asked[OPS + 1];        /* what the ranks are to accept; 0: nothing yet */
byte agreed[OPS + 1];       /* ranks whose answer that they have the proposer has read */
byte decided = 0;

/* By ballot and rank: letters. */
bool promise[(OPS + 1) * R];
byte promise_in[(OPS + 1) * R];
byte promise_of[(OPS + 1) * R];
bool answer[(OPS + 1) * R];

/* By rank. */
byte promised[R];
byte accepted_in[R];
byte accepted[R];

#define AT(ballot, rank) ((ballot) * R + (rank))
#if R == 2
#define COUNT(set) (((set) & 1) + ((set) >> 1 & 1))
#elif R == 3
#define COUNT(set) (((set) & 1) + ((set) >> 1 & 1) + ((set) >> 2 & 1))
#else
#define COUNT(set) (((set) & 1) + ((set) >> 1 & 1) + ((set) >> 2 & 1) + ((set) >> 3 & 1))
#endif
#ifdef NO_LOWEST
#define HAS_TIE_BREAK(set) true
#else
#define HAS_TIE_BREAK(set) ((set) & 1)
#endif
#define IS_QUORUM(set) (2 * COUNT(set) > R || (2 * COUNT(set) == R && HAS_TIE_BREAK(set)))

/* All that may happen in ballot `b` with rank `a`. */
active proctype Everybody() {
  byte b;
  byte a;
  do
  :: true ->
     atomic {
       select(b : 1 .. OPS);
       select(a : 0 .. R - 1);
       if
       /* The proposer asks for promises. */
       :: !begun[b] -> begun[b] = true

       /* A rank reads that, and promises to accept in no earlier ballot any more. */
       :: begun[b] && b > promised[a] ->
          promised[a] = b;
          if
          :: asked[b] == 0 ->
             promise[AT(b, a)] = true;
             promise_in[AT(b, a)] = accepted_in[a];
             promise_of[AT(b, a)] = accepted[a]
          :: else -> skip  /* comes too late */
          fi

       /* The proposer reads a promise; with enough of them it asks to accept. */
       :: promise[AT(b, a)] ->
          promise[AT(b, a)] = false;
          heard[b] = heard[b] | 1 << a;
          if
          :: promise_in[AT(b, a)] > kept_in[b] ->
             kept_in[b] = promise_in[AT(b, a)];
             kept[b] = promise_of[AT(b, a)]
          :: else -> skip
          fi;
          promise_in[AT(b, a)] = 0;
          promise_of[AT(b, a)] = 0;
          if
          :: IS_QUORUM(heard[b]) ->
#ifdef NO_KEEP
             asked[b] = b;
#else
             asked[b] = (kept_in[b] > 0 -> kept[b] : b);
#endif
             /* Nothing more is done with other promises: states that differ in them are one. */
             heard[b] = 0; kept_in[b] = 0; kept[b] = 0;
             a = 0;
             do
             :: a < R ->
                promise[AT(b, a)] = false; promise_in[AT(b, a)] = 0; promise_of[AT(b, a)] = 0; a++
             :: else -> break
             od
          :: else -> skip
          fi

       /* A rank accepts. */
#ifdef NO_PROMISE
       :: asked[b] != 0 && !answer[AT(b, a)] ->
#else
       :: asked[b] != 0 && !answer[AT(b, a)] && b >= promised[a] ->
#endif
          promised[a] = b;
          accepted_in[a] = b;
          accepted[a] = asked[b];
          answer[AT(b, a)] = true

       /* The proposer reads that; with enough of them it is decided. */
       :: answer[AT(b, a)] && !(agreed[b] >> a & 1) ->
          agreed[b] = agreed[b] | 1 << a;
          if
          :: IS_QUORUM(agreed[b]) ->
             assert(decided == 0 || decided == asked[b]);
             decided = asked[b]
          :: else -> skip
          fi
       :: else -> skip
       fi;
       a = 0;
       b = 0
     }
  od
}
