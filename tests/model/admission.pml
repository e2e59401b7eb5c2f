/* Admission: how many items are begun, counted from what is there. README.md says what is modelled. */

#define NO 255
#define LEARNER 3

/* What is shared. Slots: the ticket + 1 of the row that is there, and of the one that is absorbed. */
byte word[CAP], at[CAP];
byte claim[CAP];              /* 0: nobody had it; 1: held; 2: done; 3: nobody gets it */
bit leaf[CAP];
byte head, absorbed;
byte handed_out, gone;        /* of rows that are there; of rows that have gone */
byte going1, gone_with_it;    /* the row that is going, and what `gone` is then */
byte open[3];                 /* of writers 1 and 2: items that they may write */
byte version;
bit dirty;
byte owner;                   /* of the lock; 0: nobody */

/* What the verdicts know. */
bit dead[5];
byte kills = KILLS;
byte truth;                   /* items that were admitted, and neither given back nor lost with their writer */
byte finished;

#define LIMIT ((1 + version) * BATCH)
#define HAS_ROOM (head - absorbed < CAP && (word[head % CAP] == 0 || claim[head % CAP] >= 2))
#define IS_OUT(c) ((c) == 1 || (c) == 2)

/* A death here, if there is one left. */
#define MAY_DIE if :: kills > 0 -> atomic { kills--; dead[me] = 1; goto died } :: true fi

inline lock() {
  atomic { owner == 0 || dead[owner] -> owner = me };
  if :: dirty -> recover() :: else fi
}
inline unlock() { owner = 0 }

inline end_item(s) {
  if :: IS_OUT(claim[s]) -> handed_out--; MAY_DIE :: else fi;
  claim[s] = 3;
  MAY_DIE
}

inline finish_going() {
  if
  :: going1 != 0 ->
    gone = gone_with_it;
    MAY_DIE;
    g = (going1 - 1) % CAP;
    if :: at[g] == going1 -> end_item(g) :: else fi;
    going1 = 0;
    MAY_DIE
  :: else
  fi
}

inline evict(s) {
  if
  :: IS_OUT(claim[s]) ->
#ifdef NOLOG
    gone++;
    MAY_DIE;
    handed_out--;
#else
    gone_with_it = gone + 1;
    going1 = at[s];
    MAY_DIE;
    finish_going();
#endif
  :: else
  fi;
  leaf[s] = 0;
  MAY_DIE;
  claim[s] = 3;
  at[s] = 0;
  MAY_DIE;
  claim[s] = 0
}

inline absorb() {
  dirty = 1;
  end = head;
  do
  :: absorbed < end ->
    s = absorbed % CAP;
    if :: at[s] != 0 && at[s] != word[s] -> evict(s) :: else fi;
    if
    :: at[s] == 0 && word[s] != 0 -> claim[s] = 0; at[s] = word[s]; MAY_DIE; leaf[s] = 1; MAY_DIE
    :: else
    fi;
    absorbed++;
    MAY_DIE
  :: else -> break
  od;
  dirty = 0
}

/* Rows that were passed go; what is counted is counted anew. What the dead held is free again. */
inline recover() {
  finish_going();
  s = 0;
  do
  :: s < CAP ->
    if :: at[s] != 0 && at[s] != word[s] -> evict(s) :: else fi;
    s++
  :: else -> break
  od;
  s = 0; handed_out = 0;
  do
  :: s < CAP ->
    if :: at[s] == 0 -> claim[s] = 0; leaf[s] = 0 :: else fi;
    if :: claim[s] == 1 && dead[LEARNER] -> claim[s] = 0 :: else fi;
    if :: IS_OUT(claim[s]) -> handed_out++ :: else fi;
    leaf[s] = (at[s] != 0 && claim[s] == 0);
    s++
  :: else -> break
  od;
  MAY_DIE;
  dirty = 0
}

/* The sum over writers, one after the other; and the rest. */
inline count(n) {
#ifdef ROWSFIRST
  n = head - absorbed;
  n = n + open[1];
  n = n + open[2];
#else
  n = open[1];
  n = n + open[2];
  n = n + head - absorbed;
#endif
  s = 0;
  do :: s < CAP -> n = n + leaf[s]; s++ :: else -> break od;
  n = n + handed_out + gone
}

proctype Writer(byte me) {
  byte s, g, end, n, items = ITEMS;
  bit wrote;
  do
  :: items > 0 ->
    items--;
    lock();
    MAY_DIE;
    count(n);
    if
    :: n < LIMIT ->
      atomic { open[me]++; truth++; assert(truth <= LIMIT) };  /* no_more_than_admitted */
      MAY_DIE;
      unlock();
      wrote = 0;
      if
      :: atomic { HAS_ROOM -> wrote = 1 }
      :: true  /* the block ends without a row */
      fi;
#ifdef GIVEFIRST
      open[me]--;
#endif
      if
      :: wrote ->
        atomic { if :: HAS_ROOM -> word[head % CAP] = head + 1; head++ :: else -> wrote = 0 fi }
      :: else
      fi;
      if :: wrote && kills > 0 -> atomic { kills--; dead[me] = 1; goto died_written } :: true fi;
#ifndef GIVEFIRST
      atomic { open[me]--; truth = truth - !wrote }
#else
      truth = truth - !wrote
#endif
    :: else -> absorb(); unlock()
    fi
  :: else -> break
  od;
  goto over;
died:
  atomic { truth = truth - open[me]; goto over };  /* what it had begun is lost */
died_written:  /* its row is there, and counts */
over:
  finished++
}

/* Draws an item and is done with it, or gives it back, and publishes a version after each that is done. */
proctype Learner(byte me) {
  byte s, g, end, mine, rounds = DRAWS;
  do
  :: rounds > 0 ->
    rounds--;
    lock();
    absorb();
    mine = 0;
    do
    :: mine < CAP && leaf[mine] == 0 -> mine++
    :: else -> break
    od;
    if
    :: mine < CAP ->
      dirty = 1;
      claim[mine] = 1; MAY_DIE;
      handed_out++; leaf[mine] = 0; MAY_DIE;
      dirty = 0
    :: else
    fi;
    unlock();
    MAY_DIE;
    if
    :: mine < CAP ->
      lock();
      dirty = 1;
      if
      :: claim[mine] = 2; MAY_DIE; dirty = 0; version++
      :: leaf[mine] = 1; MAY_DIE; claim[mine] = 0; MAY_DIE; handed_out--; dirty = 0
      fi;
      unlock()
    :: else
    fi
  :: else -> break
  od;
died:
  finished++
}

/* Once all is quiet: the dead writers' items are given back, and what counts is what is true. */
init {
  byte me = 4, s, g, end, n;
  atomic { run Writer(1); run Writer(2); run Learner(LEARNER) };
  finished == 3;
  kills = 0;
#ifndef NORECLAIM
  if :: dead[1] -> open[1] = 0 :: else fi;
  if :: dead[2] -> open[2] = 0 :: else fi;
#endif
  lock();
  absorb();
  count(n);
  assert(n == truth);  /* nothing_leaks_or_doubles */
died:
  skip
}
