/* The protocol of docs/design.md: control words, the two halves, and who may overwrite what when.
 *
 * Every rank runs the same OPS operations, of kinds chosen at the start. What the library leaves to its
 * caller is chosen freely here: the half of every operation (so also every half that a replayed graph may
 * bake in), which hooks are held back and for how long. A row is one cell per (owner, half, source) that
 * holds the epoch that wrote it; whoever reads a row asserts that it is the row of his own operation.
 *
 * Checked: no row is overwritten while somebody may still read it; no wait is satisfied by a word of
 * another epoch; no deadlock (an invalid end state).
 *
 * Each rule can be taken out, to show that the model can fail:
 *   -DNO_RULE1      publish without waiting for completed >= e - 2
 *   -DNO_RULE2      write the combine region without waiting for its last readers
 *   -DNO_RULE3      write view rows into the half announced last, without waiting for this header
 *   -DNO_REFUSALS   allow operations that would wait for themselves
 *   -DNO_EPOCHS     control words without epochs: any earlier word satisfies a wait
 * models/check.sh runs all of it.
 */

#ifndef R
#define R 2
#endif
#ifndef OPS
#define OPS 6
#endif

#define PACKED 0
#define SLOTTED 1
#define COMBINE 2

/* One rank's block, written by its peers: words by parity and source; epoch 0 is before the first. */
typedef Block {
  byte header[2 * R];       /* epoch of the header, and the half that it announces */
  byte header_half[2 * R];
  byte arrived[2 * R];
  byte completed[R];
  byte view[2 * R];         /* rows, by half and source */
  byte landing[2 * R];      /* rows, by parity and source */
  byte combine[2]           /* one cell a half: written by the owner, read by all */
};
Block block[R];

byte kind[OPS + 1];

#define AT(parity, source) ((parity) * R + (source))

#ifdef NO_EPOCHS
#define IS_OF(word, epoch) ((word) != 0)
#else
#define IS_OF(word, epoch) ((word) == (epoch))
#endif

/* `condition(p)` for every rank: waiting for all at once is waiting for each in turn, since what is
 * waited for stays. Unused ranks are left out by the preprocessor. */
#if R == 2
#define ALL(condition) (condition(0) && condition(1))
#else
#define ALL(condition) (condition(0) && condition(1) && condition(2))
#endif

#define HAS_ENTERED(q) (block[me].completed[q] + 2 >= e)
#define HAS_READ(q) (block[me].completed[q] >= last_use[h])
#define HAS_HEADER(q) (IS_OF(block[me].header[AT(epoch % 2, q)], epoch))
#define HAS_ARRIVED(q) (IS_OF(block[me].arrived[AT(epoch % 2, q)], epoch))
#define VIEW_IS(q) (block[me].view[AT(h, q)] == view_of[h])

inline complete(epoch) {
  p = 0;
  do
  :: p < R -> block[p].completed[me] = epoch; p++
  :: p == R -> p = 0; break
  od
}

/* The receive phase of a slotted dispatch or a combine. */
inline receive(epoch) {
  ALL(HAS_HEADER);
  if
  :: kind[epoch] == SLOTTED -> ALL(HAS_ARRIVED)
  :: else -> skip
  fi;
  p = 0;
  do  /* one row at a time: peers act in between */
  :: p < R ->
     atomic {
       assert(block[me].header[AT(epoch % 2, p)] == epoch);
       if
       :: kind[epoch] == SLOTTED -> assert(block[me].landing[AT(epoch % 2, p)] == epoch)
       :: else -> assert(block[p].combine[block[me].header_half[AT(epoch % 2, p)]] == epoch)
       fi;
       p++
     }
  :: p == R -> p = 0; break
  od;
  complete(epoch)
}

/* The send phase of a packed dispatch, which waits for its peers, and its receive phase. */
inline packed(epoch) {
#ifndef NO_RULE3
  ALL(HAS_HEADER);
#endif
  p = 0;
  do
  :: p < R ->
     block[p].view[AT(block[me].header_half[AT(epoch % 2, p)], me)] = epoch;
     block[p].arrived[AT(epoch % 2, me)] = epoch;
     p++
  :: p == R -> p = 0; break
  od;
  atomic {
    ALL(HAS_ARRIVED);
    view_of[h] = epoch;
    assert(ALL(VIEW_IS))
  };
  complete(epoch)
}

proctype Rank(byte me) {
  byte e = 1;          /* the operation to send next */
  byte h = 0;
  byte p = 0;
  byte held[2];        /* epochs whose hooks have not run, oldest first; 0: none */
  byte held_half[2];
  byte last_use[2];    /* by half: epoch of the combine that used its combine region last */
  byte view_of[2];     /* by half: epoch of the packed dispatch whose view lies there */

  do
  /* Run the oldest hook. */
  :: held[0] != 0 ->
     receive(held[0]);
     atomic {
       held[0] = held[1];
       held_half[0] = held_half[1];
       held[1] = 0;
       held_half[1] = 0
     }

  /* Send the next operation. Packed dispatches have no hook, and wait: not while a hook is held. */
#ifndef NO_REFUSALS
  :: e <= OPS && held[1] == 0 && (kind[e] != PACKED || held[0] == 0) ->
#else
  :: e <= OPS && held[1] == 0 ->
#endif
     atomic {
       if
       :: h = 0
       :: h = 1
       fi;
#ifndef NO_REFUSALS
       if  /* a half whose last operation's hook has not run is skipped */
       :: held[0] != 0 && held_half[0] == h -> h = 1 - h
       :: else -> skip
       fi
#endif
     };
#ifndef NO_RULE1
     ALL(HAS_ENTERED);
#endif
     if
     :: kind[e] == COMBINE ->
        atomic {
#ifndef NO_RULE2
          ALL(HAS_READ);
#endif
          block[me].combine[h] = e;
          last_use[h] = e
        }
     :: kind[e] == PACKED && view_of[h] != 0 ->
        /* The caller may read a view until he gives its half away: it is still whole. */
        atomic {
          assert(ALL(VIEW_IS));
          view_of[h] = 0
        }
     :: else -> skip
     fi;
     do
     :: p < R ->
        atomic {  /* one 64-bit word */
          block[p].header[AT(e % 2, me)] = e;
          block[p].header_half[AT(e % 2, me)] = h
        };
        if
        :: kind[e] == SLOTTED ->
           block[p].landing[AT(e % 2, me)] = e;
           block[p].arrived[AT(e % 2, me)] = e
        :: else -> skip
        fi;
        p++
     :: p == R -> p = 0; break
     od;
     if
     :: kind[e] == PACKED -> packed(e)
     :: else ->
        if  /* without a hook the receive phase follows at once; with one it is held back */
        :: held[0] == 0 -> receive(e)
        :: held[0] == 0 -> atomic { held[0] = e; held_half[0] = h }
        :: held[0] != 0 -> atomic { held[1] = e; held_half[1] = h }
        fi
     fi;
     atomic { e++; h = 0 }

  :: e > OPS && held[0] == 0 -> break
  od
}

init {
  byte i = 1;
  atomic {
    do
    :: i <= OPS ->
       if
       :: kind[i] = PACKED
       :: kind[i] = SLOTTED
       :: kind[i] = COMBINE
       fi;
       i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < R -> run Rank(i); i++
    :: else -> break
    od
  }
}
