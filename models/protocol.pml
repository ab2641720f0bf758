/* The protocol of docs/design.md: control words, the two halves, and who may overwrite what when.
 *
 * Every rank runs the same OPS operations; their kinds are chosen freely, and so is what the library
 * leaves to its caller: the half of every operation, which hooks are held back and for how long. A half
 * may be used any number of times running, as a replayed graph uses the one that was captured with it.
 * Nothing is fair: a rank may be arbitrarily slow at any point. Crashing ranks are in membership.pml.
 *
 * A row is one cell per (owner, half, source) that holds the epoch that wrote it; whoever reads a row
 * asserts that it is the row of his own operation.
 *
 * Checked: no row is overwritten while somebody may still read it; no wait is satisfied by a word of
 * another epoch; no deadlock (an invalid end state).
 *
 * Steps. Only a wait, and what follows it up to the next wait, is a step: a rank's stores to all peers,
 * and its reads with the store that says they are over. Nothing is lost by that. Words are waited for,
 * never found missing, and stay until what they announce is over; so a store may be moved to the one
 * before it and a read to the store behind it: whatever another rank did in between, it could as well
 * have done before, unless it read what the store overwrites or wrote what the read reads, which is a
 * violation, or a wait without end, in that order too. With -DFINE and 2 ranks waits,
 * reads and stores are steps of their own.
 *
 * What is dead is forgotten: words, rows and the kind of an operation that all have completed become 0,
 * which no assertion takes for an epoch. Otherwise states would differ by their past alone.
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

#define NONE 0
#define PACKED 1
#define SLOTTED 2
#define COMBINE 3

#define SEND 0
#define WRITE 1
#define ARRIVE 2
#define RECEIVE 3
#define STOP 4

#define OLD 255  /* in place of the epoch of a view that all have completed */

/* Between the parts of a step. */
#ifdef FINE
#define THEN }; atomic {
#else
#define THEN ;
#endif

/* One rank's block, written by its peers: words by parity and source; epoch 0 is before the first. */
typedef Block {
  byte header[2 * R];       /* epoch of the header, and the half that it announces */
  byte header_half[2 * R];
  byte arrived[2 * R];
  byte completed[R];
  byte view[2 * R];         /* rows, by half and source */
  byte landing[2 * R];      /* rows, by parity and source */
  byte combine[2];          /* one cell a half: written by the owner, read by all */
  byte last_use[2];         /* by half: epoch of the combine that used its combine region last, */
  byte view_of[2]           /* and of the packed dispatch whose view lies there; 0: done with */
};
Block block[R];
byte kind[OPS + 1];

#define AT(parity, source) ((parity) * R + (source))

#ifdef NO_EPOCHS
#define IS_OF(word, epoch) ((word) != 0)
#else
#define IS_OF(word, epoch) ((word) == (epoch))
#endif

/* What a rank does with itself comes first: nobody else sees when. */
#define PEER1 ((me + 1) % R)
#define PEER2 ((me + 2) % R)
#if R == 2
#define ALL(condition) (condition(me) && condition(PEER1))
#define FOR_ALL(action) action(me); action(PEER1)
#else
#define ALL(condition) (condition(me) && condition(PEER1) && condition(PEER2))
#define FOR_ALL(action) action(me); action(PEER1); action(PEER2)
#endif

#define HAS_ENTERED(q) (block[me].completed[q] + 2 >= op)
#define HAS_READ(q) (block[me].completed[q] >= block[me].last_use[h])
#define HAS_HEADER(q) (IS_OF(block[me].header[AT(op % 2, q)], op))
#define HAS_ARRIVED(q) (IS_OF(block[me].arrived[AT(op % 2, q)], op))
#define HAS_COMPLETED(q) (block[me].completed[q] >= op)
#define IS_FRESH(q) (block[me].header[AT(op % 2, q)] == op)
#define VIEW_IS(q) (block[me].view[AT(h, q)] == block[me].view_of[h])
#define HALF_OF(q) block[me].header_half[AT(op % 2, q)]

/* Halves that carry nothing are alike, and a slotted dispatch that is over at once uses neither. */
#define HALVES_DIFFER \
  (block[me].last_use[0] != block[me].last_use[1] || block[me].view_of[0] != block[me].view_of[1])

#define ANNOUNCE(q) \
  block[q].header[AT(op % 2, me)] = op; \
  block[q].header_half[AT(op % 2, me)] = h
#define LAND(q) \
  block[q].landing[AT(op % 2, me)] = op; \
  block[q].arrived[AT(op % 2, me)] = op
#define PLACE(q) \
  block[q].view[AT(HALF_OF(q), me)] = op; \
  block[q].arrived[AT(op % 2, me)] = op
#define READ_LANDED(q) assert(block[me].landing[AT(op % 2, q)] == op)
#define READ_OUTPUTS(q) assert(block[q].combine[HALF_OF(q)] == op)
#define COMPLETE(q) block[q].completed[me] = op

/* Once all have completed the operation at hand, forgets what it was. */
inline forget() {
  if
  :: ALL(HAS_COMPLETED) ->
     kind[op] = NONE;
#ifndef NO_EPOCHS
     p = 0;
     do
     :: p < R * R ->
        if
        :: block[p / R].header[AT(op % 2, p % R)] == op ->
           block[p / R].header[AT(op % 2, p % R)] = 0;
           block[p / R].header_half[AT(op % 2, p % R)] = 0;
           block[p / R].arrived[AT(op % 2, p % R)] = 0;
           block[p / R].landing[AT(op % 2, p % R)] = 0
        :: else -> skip
        fi;
        if
        :: p % R < 2 && block[p / R].last_use[p % R] == op ->
           block[p / R].last_use[p % R] = 0;
           block[p / R].combine[p % R] = 0
        :: else -> skip
        fi;
        if
        :: block[p / R].view[AT(0, p % R)] == op -> block[p / R].view[AT(0, p % R)] = OLD
        :: else -> skip
        fi;
        if
        :: block[p / R].view[AT(1, p % R)] == op -> block[p / R].view[AT(1, p % R)] = OLD
        :: else -> skip
        fi;
        if
        :: p % R < 2 && block[p / R].view_of[p % R] == op -> block[p / R].view_of[p % R] = OLD
        :: else -> skip
        fi;
        p++
     :: else -> p = 0; break
     od
#endif
  :: else -> skip
  fi
}

/* What the caller does next, and with which half: anything that is not refused. Whoever comes to an
 * operation first decides its kind for all. */
inline choose() {
  h = 0;
  hook = false;
  if
  :: held[0] != 0 -> todo = RECEIVE; op = held[0]
#ifndef NO_REFUSALS
  /* Packed dispatches have no hook, and wait: not while a hook is held. */
  :: e <= OPS && held[1] == 0 && (kind[e] != PACKED || held[0] == 0) ->
#else
  :: e <= OPS && held[1] == 0 ->
#endif
     todo = SEND;
     op = e;
     if
     :: kind[e] == NONE ->
        if
#ifndef NO_REFUSALS
        :: held[0] == 0 -> kind[e] = PACKED
#else
        :: kind[e] = PACKED
#endif
        :: kind[e] = SLOTTED
        :: kind[e] = COMBINE
        fi
     :: else -> skip
     fi;
     if  /* with a hook the receive phase is held back */
     :: kind[e] != PACKED -> hook = true
     :: held[0] == 0 -> hook = false
#ifdef NO_REFUSALS
     :: kind[e] == PACKED -> hook = false
#endif
     fi;
     if
#ifndef NO_REFUSALS
     :: held[0] != 0 -> h = 1 - held_half[0]  /* its hook has not run: it is skipped */
     :: held[0] == 0 -> h = 0
     :: held[0] == 0 && HALVES_DIFFER && (hook || kind[e] != SLOTTED) -> h = 1
#else
     :: h = 0
     :: h = 1
#endif
     fi
  :: e > OPS && held[0] == 0 -> todo = STOP; op = 0
  fi
}

proctype Rank(byte me) {
  byte todo = STOP;    /* the next step */
  byte e = 1;          /* the operation to send next */
  byte op = 0;         /* the operation at hand, */
  byte h = 0;          /* its half, and */
  bool hook = false;   /* whether its receive phase will be held back */
  byte held[2];        /* epochs whose hooks have not run, oldest first; 0: none */
  byte held_half[2];
  byte p = 0;

  atomic { choose() };
  do
  :: atomic {
       (todo == SEND
#ifndef NO_RULE1
       && ALL(HAS_ENTERED)
#endif
#ifndef NO_RULE2
       && (kind[op] != COMBINE || ALL(HAS_READ))
#endif
       ) THEN
       if
       :: kind[op] == COMBINE ->
          block[me].combine[h] = op;
          block[me].last_use[h] = op
       :: kind[op] == PACKED && block[me].view_of[h] != 0 ->
          /* The caller may read a view until he gives its half away: it is still whole. */
          assert(ALL(VIEW_IS));
          block[me].view_of[h] = 0;
          p = 0;
          do
          :: p < R -> block[me].view[AT(h, p)] = 0; p++
          :: else -> p = 0; break
          od
       :: else -> skip
       fi
       THEN
       FOR_ALL(ANNOUNCE)
       THEN
       if
       :: kind[op] == SLOTTED -> FOR_ALL(LAND)
       :: else -> skip
       fi;
       e++;
       if
       :: kind[op] == PACKED -> todo = WRITE
       :: kind[op] != PACKED && !hook -> todo = RECEIVE
       :: kind[op] != PACKED && hook ->
          if
          :: held[0] == 0 -> held[0] = op; held_half[0] = h
          :: else -> held[1] = op; held_half[1] = h
          fi;
          choose()
       fi
     }

  /* A packed dispatch waits for all counts, which come with the headers, and writes its rows. */
  :: atomic {
       (todo == WRITE
#ifndef NO_RULE3
       && ALL(HAS_HEADER)
#endif
       ) THEN
       FOR_ALL(PLACE);
       todo = ARRIVE
     }
  :: atomic {
       (todo == ARRIVE && ALL(HAS_ARRIVED))
       THEN
       block[me].view_of[h] = op;
       assert(ALL(VIEW_IS))
       THEN
       FOR_ALL(COMPLETE);
       forget();
       choose()
     }

  /* The receive phase of a slotted dispatch or a combine, perhaps by its hook. */
  :: atomic {
       (todo == RECEIVE && ALL(HAS_HEADER) && (kind[op] != SLOTTED || ALL(HAS_ARRIVED)))
       THEN
       assert(ALL(IS_FRESH));
       if
       :: kind[op] == SLOTTED -> FOR_ALL(READ_LANDED)
       :: else -> FOR_ALL(READ_OUTPUTS)
       fi
       THEN
       FOR_ALL(COMPLETE);
       forget();
       if
       :: held[0] == op ->
          held[0] = held[1];
          held_half[0] = held_half[1];
          held[1] = 0;
          held_half[1] = 0
       :: else -> skip
       fi;
       choose()
     }
  :: todo == STOP -> break
  od
}

init {
  byte i = 0;
  atomic {
    do
    :: i < R -> run Rank(i); i++
    :: else -> break
    od
  }
}
